"""Samples, evenly spread: of the records of a series that `--sample` reads, and of any values in order."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from capd.errors import ConfigError

__all__ = ["Sample", "evenly", "places_of", "share_of"]

_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)%|(0?\.\d{1,9}|1(?:\.0{1,9})?)")
# Its multiples lie evenly in 0 … 1, however many are taken.
_GOLDEN = (math.sqrt(5) - 1) / 2

T = TypeVar("T")


@dataclass(slots=True)
class Sample:
    """The records that were read, and those from which they were chosen.

    Attributes:
        share: The requested share of the records of each series, more than 0 and at most 1.
        records: The records whose elements were read.
        of: All records.
        nbytes: The raw bytes of the records that were read.
        of_nbytes: The raw bytes of all records.
    """

    share: float
    records: int = 0
    of: int = 0
    nbytes: int = 0
    of_nbytes: int = 0

    def add(self, nbytes: int, *, is_read: bool) -> None:
        """Count one record."""
        self.of += 1
        self.of_nbytes += nbytes
        if is_read:
            self.records += 1
            self.nbytes += nbytes

    def extend(self, other: Sample) -> None:
        """Count the records of another part."""
        self.records += other.records
        self.of += other.of
        self.nbytes += other.nbytes
        self.of_nbytes += other.of_nbytes

    def numbers(self) -> dict[str, float]:
        """Return what JSON says about the sample."""
        return {
            "share": self.share,
            "records": self.records,
            "of_records": self.of,
            "raw_bytes": self.nbytes,
            "of_raw_bytes": self.of_nbytes,
        }


def share_of(text: str) -> float:
    """Return the share that a text such as "5%" or "0.05" names.

    Raises:
        ConfigError: It names none above 0 and up to 1.
    """
    match = _SHARE.fullmatch(text.strip())
    share = 0.0 if match is None else float(match[1]) / 100 if match[1] else float(match[2])
    if not 0 < share <= 1:
        raise ConfigError(f"--sample {text!r} is no share of the records; give one up to 100%, as 5% or 0.05")
    return share


def places_of(total: int, share: float, turn: int) -> frozenset[int]:
    """Return the places of the sampled records in a series of `total` records, at least one if there are any.

    The series is cut into equal parts, and one record of each is taken. Its place in the part differs from part to
    part and from series to series, so that no period of the job is met.

    Args:
        total: The number of records.
        share: The share to take.
        turn: The number of the series.
    """
    number = min(total, max(1, round(total * share)))
    ends = [part * total // max(1, number) for part in range(number + 1)]
    parts = enumerate(pairwise(ends), turn)
    return frozenset(start + int(at * _GOLDEN % 1 * (end - start)) for at, (start, end) in parts)


def evenly(values: Sequence[T], most: int) -> list[T]:
    """Return at most so many values, each from the middle of its part. The same values give the same ones."""
    number = min(most, len(values))
    return [values[(2 * place + 1) * len(values) // (2 * number)] for place in range(number)]
