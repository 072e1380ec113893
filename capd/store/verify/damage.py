"""The findings of `capd verify`: damage with its records, and notes about harmless oddities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["Damage", "Kind", "Report", "fold"]

# shard: in a sealed shard. spool: in a `.partial` or small log. metadata: in a zarr.json or the `moments` array.
# catalog: the catalog contradicts the frames. run: in the zarr.json of the run.
Kind = Literal["shard", "spool", "metadata", "catalog", "run"]


@dataclass(frozen=True, slots=True)
class Damage:
    """One finding.

    Attributes:
        kind: The place of the damage.
        series: The path of the series in the run, empty if no single series is damaged.
        records: The numbers of the damaged records.
        file: The path of the file in the run.
        offset: The first damaged byte, None if unknown.
        what: The description.
        node: The node that wrote this part of the run.
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
    """All findings in one run. records: the number of records found. nbytes: the bytes read and checked."""

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
        """Add the findings in one part of the run."""
        self.records += records
        self.nbytes += nbytes
        self.damaged += damaged
        self.notes += notes


def fold(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges: "0-3,7"."""
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
