"""What a round uploads: the shards and documents of the series that changed since the last manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from capd.errors import StoreError
from capd.store.catalog.rows import SeriesRow
from capd.store.disk.layout import shard_path
from capd.store.documents.json_document import is_length
from capd.store.documents.remote_state import RemoteState
from capd.store.format.codecs import crc32c
from capd.store.format.columns import TABLE_ROWS
from capd.store.format.frames import SeriesHeader
from capd.store.scan.moved_shard import moved_shard
from capd.store.segments.series_table import DocumentObject, SeriesEntry, ShardObject
from capd.store.upload.local_files import FileVersion, KnownFiles
from capd.store.upload.published_node import check_moved_to

__all__ = [
    "PlannedDocument",
    "PlannedSeries",
    "PlannedShard",
    "group_documents_of",
    "plan_series",
    "shard_key",
]

_MAX_DOCUMENT_NBYTES = 64 << 20


class PlannedShard(NamedTuple):
    """A shard that is to be uploaded. before: what the last manifest has under its key; None if nothing."""

    number: int
    path: Path
    key: str
    version: FileVersion
    before: ShardObject | None
    header: SeriesHeader


class PlannedDocument(NamedTuple):
    """A document as it was read. name: its path below the series, or below the run for a group's."""

    name: str
    key: str
    payload: bytes
    crc32c: int


@dataclass(slots=True)
class PlannedSeries:
    """One series with what is to be uploaded of it.

    Attributes:
        row: Its row in the catalog.
        before: Its entry in the last series segment.
        shards: The shards to upload.
        kept: The shards that are there already.
        documents: All its documents in the order of their upload.
        changed: Those that are not there in this form.
    """

    row: SeriesRow
    before: SeriesEntry | None
    shards: list[PlannedShard] = field(default_factory=list)
    kept: list[ShardObject] = field(default_factory=list)
    documents: list[PlannedDocument] = field(default_factory=list)
    changed: list[PlannedDocument] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The bytes of the shards to upload."""
        return sum(shard.version.nbytes for shard in self.shards)

    @property
    def is_changed(self) -> bool:
        """Whether anything of it goes up."""
        uploaded = -1 if self.before is None else self.before.row.records
        return bool(self.shards or self.changed) or uploaded != self.row.sealed


def shard_key(row: SeriesRow, number: int) -> str:
    """Return the key of a shard below its run."""
    return "/".join([row.header.path, "data", "c", str(number), *["0"] * len(row.header.geometry.extents)])


def plan_series(
    run: Path, row: SeriesRow, before: SeriesEntry | None, known: KnownFiles, state: RemoteState
) -> PlannedSeries:
    """Return what is to be uploaded of a series.

    Its documents are read before its shards are looked at: the shards hold at least what the documents name.

    Raises:
        StoreError: A document cannot be read, or a shard was moved to another address.
    """
    place, path = run / row.header.path, row.header.path
    found = PlannedSeries(row, before)
    if before is not None and before.row.header != row.header:
        # The series was removed and begun again.
        found.before = before = None
    # The reading order is the reverse of the writing order: each document is at least as new as the one before it.
    array = _document(place, path, "data/zarr.json")
    attributes = _document(place, path, "zarr.json")
    table = list(_moments(place, path))
    found.documents = [*table, *attributes, *array]
    there = {} if before is None else {one.name: one for one in before.documents}
    found.changed = [one for one in found.documents if there.get(one.name) != _object(one)]
    uploaded = {} if before is None else {one.shard: one for one in before.shards}
    records = max(row.sealed, _rows_in(array, place))
    for number in range(-(-records // row.header.geometry.shard_records)):
        key, file = shard_key(row, number), shard_path(run, row.header, number)
        held = uploaded.get(number)
        try:
            version = FileVersion.of(file.stat())
        except FileNotFoundError:
            # It was lost here, and what was uploaded is the last copy.
            found.kept += [] if held is None else [held]
            continue
        crc = known.crc32c(key, version)
        # A file with fewer bytes is a damaged one that was refused.
        if held is not None and held.crc32c == crc and version.nbytes <= held.nbytes:
            found.kept.append(held)
        elif (moved := moved_shard(run, file)) is not None:
            check_moved_to(run, moved, state.to)
            found.kept.append(ShardObject(number, moved.nbytes, moved.crc32c))
        else:
            found.shards.append(PlannedShard(number, file, key, version, held, row.header))
    return found


def _object(document: PlannedDocument) -> DocumentObject:
    return DocumentObject(document.name, len(document.payload), document.crc32c)


def _moments(place: Path, path: str) -> Iterator[PlannedDocument]:
    """Yield the chunks of the `moments` array, then its zarr.json; nothing if there is none."""
    end = _document(place, path, "moments/zarr.json")
    if not end:
        return
    for number in range(-(-_rows_in(end, place) // TABLE_ROWS)):
        yield from _document(place, path, f"moments/c/{number}/0")
    yield from end


def _rows_in(documents: list[PlannedDocument], place: Path) -> int:
    """Return the length of the first axis in the document of an array; 0 without one."""
    for document in documents:
        try:
            rows = json.loads(document.payload)["shape"][0]
        except (ValueError, LookupError, TypeError, RecursionError):
            rows = None
        if not is_length(rows):
            raise StoreError(
                f"{place / document.name} is no document of an array; `capd verify --repair` says what can be saved"
            )
        return int(rows)
    return 0


def _document(place: Path, path: str, name: str) -> list[PlannedDocument]:
    """Return a document as a list; empty if it is missing."""
    file = place / name
    try:
        with file.open("rb") as opened:
            payload = opened.read(_MAX_DOCUMENT_NBYTES + 1)
    except FileNotFoundError:
        return []
    if len(payload) > _MAX_DOCUMENT_NBYTES:
        raise StoreError(f"{file} has more than {_MAX_DOCUMENT_NBYTES} bytes")
    return [PlannedDocument(name, f"{path}/{name}", payload, crc32c(payload))]


def group_documents_of(run: Path, paths: Iterable[str], sent: Mapping[str, int]) -> list[PlannedDocument]:
    """Return the documents of the run and its groups above some series that were not sent in this form.

    Args:
        run: The directory of the run.
        paths: The paths of the series.
        sent: The checksums of those that were sent, by key.
    """
    names = {""}
    for path in paths:
        parts = path.split("/")[:-1]
        names |= {"/".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    found: list[PlannedDocument] = []
    # The deepest first, and the run's own last.
    for name in sorted(names, key=lambda name: (-name.count("/") if name else 1, name)):
        for one in _document(run / name if name else run, name, "zarr.json"):
            key = one.key.lstrip("/")
            if sent.get(key) != one.crc32c:
                found.append(PlannedDocument(key, key, one.payload, one.crc32c))
    return found
