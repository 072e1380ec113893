"""The disk space of runs: what catalogs tell, what can be freed, and what a walk of the directories finds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from capd.lifecycle.inventory import RunFacts
from capd.lifecycle.moved import moved_records
from capd.store.catalog.rows import SeriesRow
from capd.store.disk.layout import node_directory, nodes_of
from capd.store.read.node import NodeView
from capd.store.scan.moved_shard import STUB_GLOB

__all__ = ["FIELDS", "Usage", "spare_files", "usage_by", "walked"]

FIELDS = ("run", "quant_type", "rank", "layer", "tensor_name")
"""The fields by which space is counted."""


@dataclass(slots=True)
class Usage:
    """The space of some series.

    Attributes:
        series: Their number.
        records: Their records. Errors of formats count as stored bytes and files alone, as in `Held`.
        raw_bytes: The bytes of the records before encoding.
        stored_bytes: The bytes of the encoded payloads and frames on this disk; of a run with its logs, its
            catalogs and what a flight recorder holds in it.
        files: Their files: shards and documents; of a run with those of its nodes.
        reclaimable_bytes: The bytes that `capd gc` can free in the run: quarantine and leftovers of kills.
        moved_bytes: The bytes of payloads and frames that were moved to an object store.
    """

    series: int = 0
    records: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    files: int = 0
    reclaimable_bytes: int = 0
    moved_bytes: int = 0

    def add(self, other: Usage) -> None:
        """Add the counts of other series."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


def usage_by(runs: Sequence[RunFacts], by: Sequence[str]) -> list[tuple[dict[str, Any], Usage]]:
    """Return the space by the values of some of FIELDS, in order. By `run` alone, all files of the runs count.

    Raises:
        NotAStore: A run cannot be read.
        StoreError: A catalog is locked.
    """
    groups: dict[tuple[Any, ...], Usage] = {}
    for facts in runs:
        series = [
            (row.header.key, _of_series(facts, node, row))
            for node in (NodeView(facts.path, node_directory(facts.path, name)) for name in facts.nodes)
            for row in node.series.values()
        ]
        if list(by) == ["run"]:
            groups[(facts.run_id,)] = _of_run(facts, [usage for _, usage in series])
            continue
        for key, usage in series:
            values = tuple(facts.run_id if field == "run" else getattr(key, field) for field in by)
            groups.setdefault(values, Usage()).add(usage)
    order = sorted(groups, key=lambda values: [(value is None, str(type(value)), value) for value in values])
    return [(dict(zip(by, values, strict=True)), groups[values]) for values in order]


def _of_series(facts: RunFacts, node: NodeView, row: SeriesRow) -> Usage:
    # Two documents, and the shards of all records.
    files = 2 + -(-row.records // row.header.geometry.shard_records)
    moved = 0
    if facts.moved_bytes and (numbers := [n for part in moved_records(facts.path, row) for n in part]):
        moved = node.stored_nbytes(row.header.path, numbers)
    stored = row.stored_bytes - moved
    if row.holds_errors:
        return Usage(stored_bytes=stored, files=files, moved_bytes=moved)
    return Usage(1, row.records, row.raw_bytes, stored, files, moved_bytes=moved)


def _of_run(facts: RunFacts, series: Iterable[Usage]) -> Usage:
    total = Usage()
    for usage in series:
        total.add(usage)
    total.stored_bytes += facts.other_bytes
    spare = list(spare_files(facts.path))
    total.reclaimable_bytes = sum(nbytes for _, nbytes in spare)
    # The run's document and its lock, and a catalog for each node.
    total.files += len(spare) + 2 + len(facts.nodes)
    return total


def spare_files(run: Path) -> Iterator[tuple[Path, int]]:
    """Yield what `capd gc` frees in a run, with its bytes: quarantines and the temporary files of kills."""
    for node in nodes_of(run):
        directory = node_directory(run, node)
        # A link leads to files that are not the run's.
        if directory.is_symlink() or directory.parent.is_symlink():
            continue
        place, spool = directory / "quarantine", directory / "spool"
        for path in directory.glob(STUB_GLOB):
            yield path, walked(path)[1]
        if place.is_dir() and not place.is_symlink():
            yield place, walked(place)[1]
        if spool.is_symlink():
            continue
        for pattern in ("*.tmp", "*.new"):
            for path in spool.glob(pattern):
                yield path, walked(path)[1]


def walked(place: Path) -> tuple[int, int]:
    """Return the files below a path and their bytes on disk. Links are not followed."""
    files, nbytes = 0, 0
    if place.is_symlink() or not place.is_dir():
        with contextlib.suppress(OSError):
            return 1, place.lstat().st_blocks * 512
    for directory, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(OSError):
                files, nbytes = files + 1, nbytes + os.lstat(os.path.join(directory, name)).st_blocks * 512
    return files, nbytes
