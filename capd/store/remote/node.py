"""A reader's view of one node's part of a run in an object store: its manifest, and the segments that it names.

The view offers readers what the view of a local directory offers. The series segment is fetched when a series is asked
for, and of the record segments only the ranges of the rows that are read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from capd.errors import DamagedRecord, ObjectStoreError
from capd.store.alerts.alert import Alert
from capd.store.alerts.file import MAX_ALERTS_NBYTES, parse_alerts
from capd.store.catalog.rows import SeriesRow, SessionRow
from capd.store.documents.headers import sound_row
from capd.store.format.codecs import crc32c
from capd.store.format.frames import RecordHead, RecordRow, SeriesHeader, decode_head, decode_row
from capd.store.keeps.file import MAX_KEEPS_NBYTES, parse_keeps
from capd.store.keeps.keep import Keep
from capd.store.objects.address import Address
from capd.store.objects.bucket import Bucket
from capd.store.remote.locate import RemoteLocator
from capd.store.remote.shard import RemoteShard
from capd.store.remote.windows import WindowCache
from capd.store.segments.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_NBYTES,
    Manifest,
    Segment,
    decode_manifest,
    node_prefix,
    segment_name,
)
from capd.store.segments.record_table import BodyRow, RecordSegment
from capd.store.segments.series_table import Part, SeriesEntry, read_series_table

__all__ = ["RemoteNode", "shard_key"]

# The rows of ten million series.
_MAX_SERIES_NBYTES = 2 << 30
H = TypeVar("H", RecordHead, RecordRow)


def shard_key(header: SeriesHeader, shard: int) -> str:
    """Return the key of a shard, below the run."""
    return "/".join([header.path, "data", "c", str(shard), *["0"] * len(header.geometry.extents)])


class RemoteNode:
    """A read-only view of one `.capd/node=…` prefix.

    Attributes:
        run: The address of the run.
        directory: The address of the node's manifest and segments.
        name: The name of the node.
        manifest: What the node has uploaded.
    """

    def __init__(self, bucket: Bucket, cache: WindowCache, name: str) -> None:
        """Read the manifest.

        Raises:
            NotAStore: A newer capd wrote it.
            ObjectStoreError: It is missing, is no manifest, or belongs to another node.
        """
        self._bucket, self._cache = bucket, cache
        self.run: Address = bucket.address
        self.directory: Address = bucket.address / node_prefix(name)
        self.name = name
        self._lock = threading.RLock()
        self.etag: str | None = None
        self.manifest = self._read_manifest()
        self._series: dict[str, SeriesRow] | None = None
        # The entries may be of a later generation than the view, and then hold more records.
        self._source = self.manifest
        self._entries: dict[str, SeriesEntry] | None = None
        self._footers: dict[int, bytes] = {}
        self._segments: dict[int, RecordSegment] = {}

    def _read_manifest(self) -> Manifest:
        key = f"{node_prefix(self.name)}/{MANIFEST_NAME}"
        payload, self.etag = self._bucket.get_versioned(key, at_most=MAX_MANIFEST_NBYTES)
        found = decode_manifest(payload, self.run / key)
        if found.node != self.name:
            raise ObjectStoreError(
                f"{self.run / key} is the manifest of node {found.node!r}, and not of this one"
            )
        return found

    @property
    def sessions(self) -> list[SessionRow]:
        """The counters of the ranks."""
        return self.manifest.sessions

    @property
    def alerts(self) -> list[Alert]:
        """The alerts that the manifest names. Damaged lines are left out.

        Raises:
            ObjectStoreError: They cannot be read, or are not those of the manifest.
        """
        return parse_alerts(self.alert_lines()).items

    def alert_lines(self) -> bytes:
        """Return the lines of the alerts, as their file on the node has them. Raises as `alerts`."""
        return self._lines(lambda: self._source.alerts, 2 * MAX_ALERTS_NBYTES)

    @property
    def keeps(self) -> list[Keep]:
        """The keeps of the flight recorder that the manifest names. Damaged lines are left out. Raises as `alerts`."""
        return parse_keeps(self.keep_lines()).items

    def keep_lines(self) -> bytes:
        """Return the lines of the keeps, as their file on the node has them. Raises as `alerts`."""
        return self._lines(lambda: self._source.keeps, MAX_KEEPS_NBYTES)

    def _lines(self, segment: Callable[[], Segment | None], at_most: int) -> bytes:
        with self._lock:
            found: bytes = self._retried(lambda: self._read_lines(segment(), at_most))
            return found

    def _read_lines(self, segment: Segment | None, at_most: int) -> bytes:
        if segment is None:
            return b""
        place = self.directory / segment.name
        if segment.nbytes > at_most:
            raise ObjectStoreError(f"{place} has {segment.nbytes} bytes; this is no segment of lines")
        payload = self._bucket.get(f"{node_prefix(self.name)}/{segment.name}", at_most=segment.nbytes)
        if len(payload) != segment.nbytes or crc32c(payload) != segment.crc32c:
            raise ObjectStoreError(f"{place} does not match the size and checksum in the manifest")
        return payload

    @property
    def series(self) -> dict[str, SeriesRow]:
        """The series by path.

        Raises:
            ObjectStoreError: The segment cannot be read.
        """
        with self._lock:
            if self._series is None:
                self._series = {path: entry.row for path, entry in self.entries.items()}
            return self._series

    @property
    def entries(self) -> dict[str, SeriesEntry]:
        """The series with their objects, by path.

        Raises:
            ObjectStoreError: The segment cannot be read.
        """
        with self._lock:
            if self._entries is None:
                self._retried(self._read_entries)
            return self._entries or {}

    def _read_entries(self) -> None:
        segment = self._source.series
        place = self.directory / segment.name
        payload = self._bucket.get(
            f"{node_prefix(self.name)}/{segment.name}", at_most=_checked_nbytes(segment, place)
        )
        if len(payload) != segment.nbytes or crc32c(payload) != segment.crc32c:
            raise ObjectStoreError(f"{place} does not match the size and checksum in the manifest")
        entries, self._footers = read_series_table(payload, place)
        found = {entry.row.header.path: entry for entry in entries}
        if len(found) != len(entries) or len(entries) != segment.rows:
            raise ObjectStoreError(
                f"{place} has {len(entries)} series instead of {segment.rows}, or one of them twice"
            )
        self._entries, self._segments = found, {}

    def _retried(self, read: Callable[[], Any]) -> Any:
        """Read something of the segments. If one is gone, a newer manifest may name others: read that once."""
        try:
            return read()
        except FileNotFoundError:
            before = self._source.generation
            self._source = self._read_manifest()
            if self._source.generation == before:
                raise
            self._entries = None
            self._read_entries()
            return read()

    # -- records ------------------------------------------------------------------------------------------

    def rows(self, path: str, first: int, last: int) -> dict[int, RecordRow]:
        """Return the records first ≤ number < last of a series."""
        header = self.entries[path].row.header
        found = self._decoded(path, first, last, decode_row)
        try:
            return {number: sound_row(row, header) for number, row in found.items()}
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise DamagedRecord(f"{path}: the segment has a row that is not valid: {error}") from error

    def ids(self, path: str, first: int, last: int) -> dict[int, RecordHead]:
        """Return the heads of the same records, which identify them."""
        return self._decoded(path, first, last, decode_head)

    def bodies(self, path: str, first: int, last: int) -> Iterator[BodyRow]:
        """Yield the rows of records first ≤ number < last as the segments have them.

        Raises:
            ObjectStoreError: They cannot be read.
        """
        with self._lock:
            yield from self._retried(lambda: list(self._bodies(path, first, last)))

    def _bodies(self, path: str, first: int, last: int) -> Iterator[BodyRow]:
        entry = self.entries[path]
        for part in entry.parts:
            low, high = max(first, part.record), min(last, part.record + part.records)
            if low >= high:
                continue
            start = part.row + low - part.record
            expected = range(low, high)
            found = 0
            for number, row in zip(
                expected, self._segment(part).read(start, start + high - low), strict=False
            ):
                if (row.series, row.record) != (entry.row.id, number):
                    raise ObjectStoreError(
                        f"{self.directory / segment_name('records', part.segment)} has no row of {path}#{number}"
                    )
                found += 1
                yield row
            if found != len(expected):
                raise ObjectStoreError(
                    f"{self.directory / segment_name('records', part.segment)} lacks rows of {path}"
                )

    def _decoded(self, path: str, first: int, last: int, decode: Callable[[bytes], H]) -> dict[int, H]:
        try:
            return {row.record: decode(row.body) for row in self.bodies(path, first, last)}
        except msgspec.MsgspecError as error:
            raise DamagedRecord(f"{path}: the segment has a row that cannot be read: {error}") from error

    def _segment(self, part: Part) -> RecordSegment:
        found = self._segments.get(part.segment)
        if found is None:
            name = segment_name("records", part.segment)
            place = self.directory / name
            known = next((one for one in self._source.records if one.name == name), None)
            footer = self._footers.get(part.segment)
            if known is None or footer is None:
                raise ObjectStoreError(f"{place} is needed, but the manifest does not name it")
            key = f"{node_prefix(self.name)}/{name}"

            def fetch(start: int, end: int) -> bytes:
                return self._bucket.get_range(key, start, end)

            found = RecordSegment(place, footer, known.nbytes, fetch)
            if found.rows != known.rows:
                raise ObjectStoreError(
                    f"{place} has {found.rows} rows, and not the {known.rows} of the manifest"
                )
            self._segments[part.segment] = found
        return found

    def attempts(self, path: str) -> tuple[int, int]:
        """Return the first and the last attempt among the records of a series; (0, 0) without records."""
        heads = self.ids(path, 0, self.entries[path].row.records).values()
        known = [head.moment.attempt for head in heads]
        return (min(known), max(known)) if known else (0, 0)

    def stored_nbytes(self, path: str, numbers: Sequence[int]) -> int:
        """Return the stored bytes of some records of a series."""
        chosen = frozenset(numbers)
        rows = self.bodies(path, 0, self.entries[path].row.records)
        return sum(row.stored_bytes for row in rows if row.record in chosen)

    @property
    def has_one_attempt(self) -> bool:
        """Whether the sessions show that all records are of the first attempt."""
        records = sum(row.records for row in self.series.values() if not row.holds_errors)
        counted = sum(session.offered for session in self.sessions)
        return not any(session.attempt for session in self.sessions) and counted >= records

    def with_attempt(self, attempt: int) -> set[str]:
        """Return the paths of all series that may have a record of this attempt."""
        return set(self.series)

    # -- shards -------------------------------------------------------------------------------------------

    def locator(self, header: SeriesHeader) -> RemoteLocator:
        """Return the search for records of a series."""
        return RemoteLocator(header, lambda number: self._shard(header, number))

    def _shard(self, header: SeriesHeader, number: int) -> RemoteShard:
        known = next((one for one in self.entries[header.path].shards if one.shard == number), None)
        key = shard_key(header, number)
        if known is None:
            raise DamagedRecord(
                f"{self.run / key}: the manifest names no such object; `capd verify` lists all damage"
            )
        return RemoteShard(self._bucket, self._cache, key, known)

    def array(self, header: SeriesHeader) -> Any:
        """Return the records of a series as a read-only zarr.Array, after a check of its document.

        Raises:
            DamagedRecord: The document contradicts the series.
            ObjectStoreError: It cannot be read.
        """
        import zarr
        from zarr.storage import ObjectStore

        from capd.store.scan.shown_array import check_document

        key = f"{header.path}/data/zarr.json"
        held = header.geometry.shard_records * len(self.entries[header.path].shards)
        check_document(self._bucket.get(key, at_most=MAX_MANIFEST_NBYTES), header, held, self.run / key)
        store = ObjectStore(self._bucket.obstore(), read_only=True)
        return zarr.open_array(store, path=self._bucket.full_key(f"{header.path}/data"), mode="r")

    # -- what only a directory on this machine does --------------------------------------------------------

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Keep what several queries share. Here everything is shared anyway."""
        yield

    def check_removal(self, path: str = "") -> None:
        """Check that nothing was removed since. Objects are immutable, so nothing is asked."""


def _checked_nbytes(segment: Segment, place: Address) -> int:
    if segment.nbytes > _MAX_SERIES_NBYTES:
        raise ObjectStoreError(f"{place} has {segment.nbytes} bytes; this is no segment of series")
    return segment.nbytes
