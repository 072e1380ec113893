"""The errors of formats by role, and compact sums of each tensor, from which the worst tensors are found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from capd.analyze.error_sums import Errors
from capd.analyze.exact import rounded
from capd.analyze.verdict.roles import role_of
from capd_client.protocol.key import Key

__all__ = ["TensorError", "VerdictSums"]


@dataclass(slots=True)
class TensorError:
    """The error of one format on one tensor, with float64 sums: 100 bytes, where exact sums take some KiB."""

    records: int = 0
    count: int = 0
    lost: int = 0
    underflows: int = 0
    saturations: int = 0
    signal: float = 0.0
    noise: float = 0.0

    def add(self, errors: Errors) -> None:
        """Add the errors of some records."""
        self.records += errors.records
        self.count += errors.count
        self.lost += errors.lost
        self.underflows += errors.underflows
        self.saturations += errors.saturations
        self.signal += rounded(errors.sums.x2)
        self.noise += rounded(errors.sums.d2)

    @property
    def sqnr_db(self) -> float | None:
        """10 * log10(Σx² / Σd²), Inf without an error, None if all compared values are zero."""
        if not self.noise:
            return math.inf if self.signal else None
        return 10 * (math.log10(self.signal) - math.log10(self.noise)) if self.signal else -math.inf

    @property
    def underflow_percent(self) -> float | None:
        """100 * underflows / count."""
        return 100 * self.underflows / self.count if self.count else None

    @property
    def saturation_percent(self) -> float | None:
        """100 * saturations / count."""
        return 100 * self.saturations / self.count if self.count else None


@dataclass(slots=True)
class _Tensor:
    path: str
    role: str
    errors: dict[str, TensorError] = field(default_factory=dict)


class VerdictSums:
    """The errors of all records, by role and format, and by tensor and format. Not thread-safe."""

    def __init__(self) -> None:
        self.roles: dict[str, dict[str, Errors]] = {}
        self._tensors: dict[Key, _Tensor] = {}

    def add(self, key: Key, path: str, errors: Mapping[str, Errors]) -> None:
        """Add the errors of some records of one key. `path`: the path of their series, or of their file."""
        if not errors:
            return
        role = role_of(key)
        of_role = self.roles.setdefault(role, {})
        tensor = self._tensors.setdefault(key, _Tensor(path, role))
        for label, one in errors.items():
            of_role.setdefault(label, Errors()).add(one)
            tensor.errors.setdefault(label, TensorError()).add(one)

    def worst(self, best: Mapping[str, str], number: int) -> list[tuple[Key, str, str, TensorError]]:
        """Return the tensors on which the best format of their role is worst, the worst first.

        Tensors that lose values come first, by their share; then the others by their SQNR. Tensors without an error are
        left out.

        Args:
            best: The best format of each role.
            number: The most tensors to return.

        Returns:
            The key, the path, the role, and the error of the role's best format.
        """
        found = [
            (key, tensor.path, tensor.role, error)
            for key, tensor in self._tensors.items()
            if (error := tensor.errors.get(best.get(tensor.role, ""))) is not None and _is_wrong(error)
        ]
        return sorted(found, key=lambda each: _order(each[3]))[:number]


def _is_wrong(error: TensorError) -> bool:
    return error.lost > 0 or (error.sqnr_db is not None and error.sqnr_db < math.inf)


def _order(error: TensorError) -> tuple[float, float]:
    return -error.lost / error.count, -math.inf if error.sqnr_db is None else error.sqnr_db
