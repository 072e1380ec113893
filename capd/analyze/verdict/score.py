"""The score of a format on the tensors of one role, and the rule that finds the best score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from capd.analyze.error_sums import Errors
from capd.analyze.format_choice import FormatChoice

__all__ = ["Ranked", "Score", "best_of", "score_of"]


class Ranked(Protocol):
    """The numbers by which formats are ranked."""

    @property
    def records(self) -> int: ...
    @property
    def lost(self) -> int: ...
    @property
    def sqnr_db(self) -> float | None: ...


def best_of(measured: Mapping[str, Ranked]) -> str | None:
    """Return the format with the most records, then the fewest lost values, then the highest SQNR, then the first.

    The result is None if no format has an SQNR.
    """

    def merit(label: str) -> tuple[int, int, float]:
        one = measured[label]
        return one.records, -one.lost, -math.inf if one.sqnr_db is None else one.sqnr_db

    return max(measured, key=merit) if any(one.sqnr_db is not None for one in measured.values()) else None


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a format on the tensors of one role.

    Attributes:
        label: The format.
        bits: Its bits per value, with scales.
        is_scaled: Whether its elements have a scale.
        role: The role of the tensors.
        records: The number of measured tensors.
        count: The number of their values.
        lost: The finite values that became NaN or Inf.
        sqnr_db: As `Errors.sqnr_db`.
        underflow_percent, saturation_percent, flush_percent: As in `Errors`.
    """

    label: str
    bits: float
    is_scaled: bool
    role: str
    records: int
    count: int
    lost: int = 0
    sqnr_db: float | None = None
    underflow_percent: float = 0.0
    saturation_percent: float = 0.0
    flush_percent: float = 0.0


def score_of(choice: FormatChoice, role: str, errors: Errors) -> Score:
    """Return the score of a format from its errors on the tensors of a role."""
    spec = choice.spec
    return Score(
        choice.label, spec.bits_per_value, spec.is_scaled, role, errors.records, errors.count, errors.lost,
        errors.sqnr_db, errors.underflow_percent or 0.0, errors.saturation_percent or 0.0, errors.flush_percent or 0.0,
    )  # fmt: skip
