"""The findings of `capd verify`: damage with its records, and notes about harmless oddities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Literal

from capd.store.objects.address import RunPlace

__all__ = ["Damage", "Kind", "Report", "fold"]

# shard: in a sealed shard. spool: in a `.partial` or small log. metadata: in a zarr.json or the `moments` array.
# catalog: the catalog contradicts the frames. run: in the zarr.json of the run. alerts: in the file of alerts.
# keeps: in the file of the recorder's keeps.
Kind = Literal["shard", "spool", "metadata", "catalog", "run", "alerts", "keeps"]


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
    """The findings in a run or in a part of it.

    Attributes:
        run: The directory of the run.
        series: The number of series.
        records: The number of records found, without errors of formats.
        error_records: The number of errors of formats on records that were found.
        nbytes: The bytes read and checked.
        damaged: The damage.
        notes: What is odd, but no damage.
        moved: The numbers of shards that were moved to an object store, by the address of the run there.
    """

    run: RunPlace
    series: int = 0
    records: int = 0
    error_records: int = 0
    nbytes: int = 0
    damaged: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    moved: Counter[str] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        """Whether no damage was found."""
        return not self.damaged

    def add(self, part: Report) -> None:
        """Add the findings in a part of the run."""
        self.records += part.records
        self.error_records += part.error_records
        self.nbytes += part.nbytes
        self.damaged += part.damaged
        self.notes += part.notes
        self.moved.update(part.moved)

    def find(
        self,
        kind: Kind,
        path: Path,
        what: str,
        *,
        series: str = "",
        records: Iterable[int] = (),
        offset: int | None = None,
        node: str = "",
    ) -> None:
        """Add damage in the file `path`."""
        file = str(path.relative_to(str(self.run)))
        self.damaged.append(Damage(kind, series, tuple(records), file, offset, what, node))


def fold(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges: "0-3,7"."""
    parts: list[str] = []
    for _, pairs in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in pairs]
        parts.append(f"{found[0]}-{found[-1]}" if len(found) > 1 else f"{found[0]}")
    return ",".join(parts)
