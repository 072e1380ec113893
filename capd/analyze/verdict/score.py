"""The scores of formats on the tensors of one role, and the rules that find the best one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from capd.analyze.verdict.levels import Levels

__all__ = ["Ranked", "RoleScores", "Score", "best_of", "is_beyond_error"]


class Ranked(Protocol):
    """The numbers by which formats are ranked on a group of records."""

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
    """The score of a format on the tensors of one role that all of its formats took.

    Attributes:
        label: The format.
        bits: Its bits per value, with scales.
        levels: The distribution of its SQNR over the tensors, None if no tensor has one.
        count: The number of values.
        lost: The finite values that became NaN or Inf.
        taken: The number of all tensors that the format took, also of those that others did not take.
        is_scaled: Whether its elements have a scale.
        is_source: Whether captured tensors have this format already.
        underflow_percent, saturation_percent, flush_percent: As in `Errors`.
    """

    label: str
    bits: float
    levels: Levels | None
    count: int = 0
    lost: int = 0
    taken: int = 0
    is_scaled: bool = True
    is_source: bool = False
    underflow_percent: float = 0.0
    saturation_percent: float = 0.0
    flush_percent: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether the format has an SQNR and loses no value."""
        return self.levels is not None and not self.lost

    @property
    def merit_db(self) -> float:
        """The SQNR by which it is ranked (`Levels.merit_db`)."""
        return 0.0 if self.levels is None else self.levels.merit_db


@dataclass(frozen=True, slots=True)
class RoleScores:
    """The scores of all formats on one role.

    Attributes:
        role: The role.
        scores: The formats' scores, in the order of the request.
        tensors: The number of tensors that any format took.
        zeros: The number of tensors that hold zeros alone. They have no SQNR.
        records: The number of records of high precision that were read.
        left_out: The number of these that hold Inf or NaN, which are left out for all formats alike.
    """

    role: str
    scores: Sequence[Score]
    tensors: int = 0
    zeros: int = 0
    records: int = 0
    left_out: int = 0

    @property
    def candidates(self) -> list[Score]:
        """The formats that can be chosen: those that took tensors, without the source's own."""
        return [one for one in self.scores if one.taken and not one.is_source]

    @property
    def first(self) -> Score | None:
        """The score with the fewest lost values, then the highest SQNR, then the fewest bits; None without any."""
        return min(self.candidates, key=lambda one: (one.lost, -one.merit_db, one.bits), default=None)

    @property
    def best(self) -> str | None:
        """The label of `first`, None if another format is as good within the error of a sample."""
        first = self.first
        if first is None or first.levels is None:
            return None
        rivals = [one for one in self.candidates if one is not first and one.is_whole and not first.lost]
        return first.label if all(is_beyond_error(first, one) for one in rivals) else None


def is_beyond_error(a: Score, b: Score) -> bool:
    """Return whether two scores differ by more than twice the standard error of a sample, always without a sample."""
    if a.levels is None or b.levels is None:
        return True
    if a.levels.error_db == b.levels.error_db == 0:
        return True
    if a.levels.error_db is None or b.levels.error_db is None:
        return False
    return abs(a.merit_db - b.merit_db) > 2 * math.hypot(a.levels.error_db, b.levels.error_db)
