"""What `capd verify` finds: damage, with the records that it touches, and notes about what is merely odd."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["Damage", "Kind", "Report", "fold"]

# shard: in a sealed shard. spool: in a `.partial` or small log. metadata: in a zarr.json or the `moments` array.
# catalog: the catalog contradicts the frames. run: the run's own zarr.json.
Kind = Literal["shard", "spool", "metadata", "catalog", "run"]


@dataclass(frozen=True, slots=True)
class Damage:
    """One finding. series: path below the run, empty where it is not one series'. records: the numbers it touches.

    file: below the run. offset: byte where it begins, where that is known. node: whose part of the run it is.
    """

    kind: Kind
    series: str
    records: tuple[int, ...]
    file: str
    offset: int | None
    what: str
    node: str = ""

    def __str__(self) -> str:
        touched = f" records {fold(self.records)}" if self.records else ""
        place = self.file + ("" if self.offset is None else f" at byte {self.offset}")
        return f"{self.series or 'run'}{touched}: {place}: {self.what}"


@dataclass(slots=True)
class Report:
    """Everything about one run. records: that were found in its files. nbytes: that were read and checked."""

    run: Path
    series: int = 0
    records: int = 0
    nbytes: int = 0
    damaged: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no damage was found."""
        return not self.damaged

    def add(self, records: int, nbytes: int, damaged: Iterable[Damage], notes: Iterable[str]) -> None:
        """Take up what one part of the run showed."""
        self.records += records
        self.nbytes += nbytes
        self.damaged += damaged
        self.notes += notes


def fold(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: "0-3,7"."""
    parts: list[str] = []
    start = previous = numbers[0]
    for number in (*numbers[1:], None):
        if number is not None and number == previous + 1:
            previous = number
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        if number is not None:
            start = previous = number
    return ",".join(parts)
