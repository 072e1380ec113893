"""The record segments of a node: new rows become a new segment, and small ones are merged from the local catalog.

A merge never downloads anything. It writes the rows of the merged segments again. The sizes grow geometrically, so each
row is written a few times at most.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from capd.store.catalog.rows import SeriesRow, head_of
from capd.store.disk.files import new_file, unlink
from capd.store.segments.manifest import Segment, generation_of, segment_name
from capd.store.segments.record_table import SegmentWriter
from capd.store.segments.series_table import Part, SeriesEntry
from capd.store.upload.local_files import OpenShard
from capd.store.upload.sending.halt import Halt
from capd.store.upload.snapshot import CatalogSnapshot
from capd.store.upload.uploaded_rows import UploadedRows

__all__ = ["MAX_SEGMENTS", "SegmentPlan", "WrittenRecords", "plan_segments", "scratch_file", "write_records"]

MAX_SEGMENTS = 8
# A segment is merged into a new one that has at least this share of its rows.
_RATIO = 2


class SegmentPlan(NamedTuple):
    """kept: the segments that stay. rows: the first record of each series that goes into the new segment."""

    kept: list[Segment]
    firsts: dict[str, int]


@dataclass(slots=True)
class WrittenRecords:
    """The records of all series after a round.

    Attributes:
        segments: The segments in order.
        footers: Their footers by generation.
        rows: The catalog row of each series with its uploaded records alone.
        parts: The places of the records of each series.
        file: The file of the new segment; None without one.
    """

    segments: list[Segment]
    footers: dict[int, bytes]
    rows: dict[str, SeriesRow] = field(default_factory=dict)
    parts: dict[str, list[Part]] = field(default_factory=dict)
    file: Path | None = None


def plan_segments(
    held: Sequence[Segment],
    footers: Container[int],
    before: Mapping[str, SeriesEntry],
    rows: Sequence[SeriesRow],
    *,
    is_complete: bool,
) -> SegmentPlan:
    """Return which segments stay and which records are written.

    Args:
        held: The segments of the last manifest.
        footers: The segments whose footers are known. Without one of them, everything is written again.
        before: The entries of the last series segment, by path, for series that still are the same.
        rows: The local series. Their sealed records go up.
        is_complete: Whether everything becomes one segment.
    """
    new = 0
    for row in rows:
        entry = before.get(row.header.path)
        new += row.sealed - (entry.row.records if entry else 0)
    kept = list(held) if all(generation_of(one.name) in footers for one in held) else []
    if new or (is_complete and len(kept) > 1):
        size = new
        while kept and (is_complete or len(kept) >= MAX_SEGMENTS or kept[-1].rows < _RATIO * size):
            size += kept.pop().rows
    generations = {generation_of(one.name) for one in kept}
    firsts = {}
    for row in rows:
        entry = before.get(row.header.path)
        parts = [part for part in entry.parts if part.segment in generations] if entry else []
        firsts[row.header.path] = sum(part.records for part in parts)
    return SegmentPlan(kept, firsts)


def scratch_file(directory: Path) -> Path:
    """Return the place of a segment that is being written, in the directory of a node that is claimed."""
    return directory / "upload" / "records.tmp"


def write_records(
    plan: SegmentPlan,
    snapshot: CatalogSnapshot,
    before: Mapping[str, SeriesEntry],
    footers: Mapping[int, bytes],
    rows: Sequence[SeriesRow],
    uploaded: UploadedRows,
    directory: Path,
    generation: int,
    halt: Halt,
) -> WrittenRecords:
    """Write the new segment into a temporary file of the node's directory.

    Args:
        plan: What is written.
        snapshot: The catalog.
        before: As for `plan_segments`.
        footers: The footers of the segments so far.
        rows: The local series.
        uploaded: The rows of the last manifest.
        directory: The directory of the node.
        generation: The number of the new segment.
        halt: The request to stop.

    Raises:
        UploadStopped: The upload was asked to stop.
        StoreError: The catalog lacks a record, or rows that only the object store has cannot be read there now.
        OSError: The file cannot be written.
    """
    kept = {generation_of(one.name) for one in plan.kept}
    found = WrittenRecords(list(plan.kept), {number: footers[number] for number in kept})
    for row in rows:
        entry = before.get(row.header.path)
        found.parts[row.header.path] = [part for part in entry.parts if part.segment in kept] if entry else []
        found.rows[row.header.path] = _Sums(row, entry).row()
    if all(plan.firsts[row.header.path] == row.sealed for row in rows):
        return found
    file = scratch_file(directory)
    unlink(file, missing_ok=True)
    # Parquet's writer would create it with the mode of the umask.
    new_file(file, [])
    with SegmentWriter(file) as writer:
        for row in rows:
            halt.check()
            path, first = row.header.path, plan.firsts[row.header.path]
            sums = _Sums(row, before.get(path))
            for number, stored, body in snapshot.records(row.id, first, row.sealed):
                writer.add(row.id, path, number, stored, uploaded.completed(row, number, body))
                sums.add(number, stored, body)
            found.rows[path] = sums.row()
        written = writer.finish()
    for row in rows:
        path, first = row.header.path, plan.firsts[row.header.path]
        if first < row.sealed:
            found.parts[path].append(Part(generation, written.starts[row.id], first, row.sealed - first))
    with OpenShard(file) as opened:
        nbytes, crc32c = opened.version.nbytes, opened.crc32c()
    found.segments.append(Segment(segment_name("records", generation), nbytes, crc32c, written.rows))
    found.footers[generation] = written.footer
    found.file = file
    return found


class _Sums:
    """The sums over the uploaded records of a series, continued from its last entry."""

    def __init__(self, row: SeriesRow, before: SeriesEntry | None) -> None:
        self._row, self._before = row, None if before is None else before.row
        self._counted = 0 if before is None else before.row.records
        self._raw = self._stored = 0
        self._shape: tuple[int, ...] | None = None

    def add(self, number: int, stored: int, body: bytes) -> None:
        if number < self._counted or self._row.sealed == self._row.records:
            return
        head = head_of(body)
        self._raw += head.nbytes
        self._stored += stored
        self._shape = (
            head.shape
            if self._shape is None or len(self._shape) != len(head.shape)
            else tuple(max(pair) for pair in zip(self._shape, head.shape, strict=True))
        )

    def row(self) -> SeriesRow:
        """Return the row of the series as if only its sealed records existed."""
        row, before = self._row, self._before
        if row.sealed == row.records:
            return SeriesRow(
                row.id,
                row.header,
                row.records,
                row.sealed,
                False,
                row.max_shape,
                row.raw_bytes,
                row.stored_bytes,
            )
        raw, stored, shape = self._raw, self._stored, self._shape
        if before is not None and before.records:
            raw += before.raw_bytes
            stored += before.stored_bytes
            if shape is None:
                shape = before.max_shape
            elif len(shape) == len(before.max_shape):
                shape = tuple(max(pair) for pair in zip(shape, before.max_shape, strict=True))
        return SeriesRow(row.id, row.header, row.sealed, row.sealed, False, shape or (), raw, stored)
