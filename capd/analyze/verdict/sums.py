"""The errors of formats by role, and compact sums of each tensor, from which scores and the worst tensors follow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from capd.analyze.error_sums import ErrorCounts, Errors, decibels
from capd.analyze.exact import ShortSum, rounded
from capd.analyze.format_choice import FormatChoice
from capd.analyze.verdict.levels import levels_of
from capd.analyze.verdict.roles import ROLES, role_of
from capd.analyze.verdict.score import RoleScores, Score
from capd_client.protocol.key import Key

__all__ = ["TensorError", "VerdictSums"]

# The formats that are dtypes of captured tensors, too.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(slots=True)
class TensorError(ErrorCounts):
    """The error of one format on one tensor, by rounded numbers of each record: 700 bytes, where `Errors` takes KiB.

    The sums of these numbers do not round, so they are the same in whatever order records are added.
    """

    _signal: ShortSum = field(default_factory=ShortSum)
    _noise: ShortSum = field(default_factory=ShortSum)
    # Of the records with a finite SQNR: their number, and the sums of the SQNRs in dB and of the squares.
    levels: int = 0
    _level_sum: ShortSum = field(default_factory=ShortSum)
    _level_squares: ShortSum = field(default_factory=ShortSum)

    @property
    def signal(self) -> float:
        """Σx² of all records."""
        return self._signal.value

    @property
    def noise(self) -> float:
        """Σd² of all records."""
        return self._noise.value

    def add(self, errors: Errors) -> None:
        """Add the errors of one record."""
        self.add_counts(errors)
        self._signal.add(rounded(errors.sums.x2))
        self._noise.add(rounded(errors.sums.d2))
        level = errors.sqnr_db
        if level is not None and math.isfinite(level):
            self.levels += 1
            self._level_sum.add(level)
            self._level_squares.add(level * level)

    def extend(self, other: TensorError) -> None:
        """Add the errors of other records."""
        self.add_counts(other)
        self.levels += other.levels
        self._signal.extend(other._signal)
        self._noise.extend(other._noise)
        self._level_sum.extend(other._level_sum)
        self._level_squares.extend(other._level_squares)

    @property
    def sqnr_db(self) -> float | None:
        """10 * log10(Σx² / Σd²), Inf without an error, None if all compared values are zero."""
        return decibels(self.signal, self.noise)

    @property
    def sqnr_db_error(self) -> float | None:
        """The standard error of the mean of the records' SQNRs, in dB, None with fewer than two."""
        if self.levels < 2:
            return None
        squares = self._level_squares.value - self._level_sum.value**2 / self.levels
        return math.sqrt(max(0.0, squares) / (self.levels - 1) / self.levels)


@dataclass(slots=True)
class _Tensor:
    """The sums of one tensor. `records`: the measured ones; `unread`: those that a sample left out."""

    path: str
    role: str
    records: int = 0
    unread: int = 0
    errors: dict[str, TensorError] = field(default_factory=dict)

    def has(self, label: str) -> bool:
        """Return whether a format took all records."""
        return label in self.errors and self.errors[label].records == self.records

    def extend(self, other: _Tensor) -> None:
        self.records += other.records
        self.unread += other.unread
        for label, error in other.errors.items():
            self.errors.setdefault(label, TensorError()).extend(error)

    @property
    def is_zero(self) -> bool:
        return not any(error.signal or error.lost for error in self.errors.values())


class VerdictSums:
    """The errors of all records, by role and format, and by tensor and format. Not thread-safe.

    Records that hold Inf or NaN are left out for all formats alike: in a block they take finite neighbours along, so
    they would speak against blocks alone.

    Attributes:
        roles: The sums over all records of a role.
    """

    roles: dict[str, dict[str, Errors]]
    _tensors: dict[Key, _Tensor]
    _dtypes: set[str]
    _records: Counter[str]
    _left_out: Counter[str]

    def __init__(self) -> None:
        self.roles, self._tensors, self._dtypes = {}, {}, set()
        self._records, self._left_out = Counter(), Counter()

    def add(self, key: Key, path: str, dtype: str, errors: Mapping[str, Errors]) -> None:
        """Add the errors of one record. `path`: the path of its series, or of its file."""
        if not errors:
            return
        role = role_of(key)
        self._records[role] += 1
        self._dtypes.add(dtype)
        if any(one.nan or one.inf for one in errors.values()):
            self._left_out[role] += 1
            return
        of_role, tensor = self.roles.setdefault(role, {}), self._tensor(key, path, role)
        tensor.records += 1
        for label, one in errors.items():
            of_role.setdefault(label, Errors()).add(one)
            tensor.errors.setdefault(label, TensorError()).add(one)

    def leave_unread(self, key: Key, path: str) -> None:
        """Count a record that the sample leaves out."""
        self._tensor(key, path, role_of(key)).unread += 1

    def extend(self, other: VerdictSums) -> None:
        """Add the errors of later records."""
        self._dtypes |= other._dtypes
        self._records.update(other._records)
        self._left_out.update(other._left_out)
        for role, errors in other.roles.items():
            of_role = self.roles.setdefault(role, {})
            for label, one in errors.items():
                of_role.setdefault(label, Errors()).add(one)
        for key, tensor in other._tensors.items():
            self._tensor(key, tensor.path, tensor.role).extend(tensor)

    def _tensor(self, key: Key, path: str, role: str) -> _Tensor:
        return self._tensors.setdefault(key, _Tensor(path, role))

    def scored(self, choices: Sequence[FormatChoice]) -> list[RoleScores]:
        """Return the scores of the formats on each role of which any record was read, in the order of ROLES."""
        return [self._scored(role, choices) for role in ROLES if self._records[role]]

    def _scored(self, role: str, choices: Sequence[FormatChoice]) -> RoleScores:
        tensors = [one for one in self._tensors.values() if one.role == role and one.errors]
        taken = {choice.label: sum(one.has(choice.label) for one in tensors) for choice in choices}
        common = [one for one in tensors if all(one.has(label) for label, number in taken.items() if number)]
        return RoleScores(
            role,
            [
                self._score(choice, common if taken[choice.label] else [], taken[choice.label])
                for choice in choices
            ],
            tensors=len(tensors),
            zeros=sum(one.is_zero for one in tensors),
            records=self._records[role],
            left_out=self._left_out[role],
        )

    def _score(self, choice: FormatChoice, tensors: Sequence[_Tensor], taken: int) -> Score:
        label, spec, whole = choice.label, choice.spec, ErrorCounts()
        values, errors = [], []
        for one in tensors:
            error = one.errors[label]
            whole.add_counts(error)
            if error.sqnr_db is not None:
                values.append(error.sqnr_db)
                errors.append(error.sqnr_db_error if one.unread else 0.0)
        return Score(
            label, spec.bits_per_value, levels_of(values, errors), whole.count, whole.lost, taken,
            is_scaled=spec.is_scaled,
            is_source=_DTYPES.get(spec.fmt) in self._dtypes,
            underflow_percent=whole.underflow_percent or 0.0,
            saturation_percent=whole.saturation_percent or 0.0,
            flush_percent=whole.flush_percent or 0.0,
        )  # fmt: skip

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
