"""Finds the file that holds a record now: the small log, a `.partial`, or a sealed shard, which may be in a bucket.

A file is used only if its COMMIT frame names exactly this capture: client, sequence, shape and chunks as in the
catalog. Records may move from log to `.partial` to sealed shard during a read. The old place stays readable until the
new one is complete, so a second search finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from capd.errors import DamagedRecord, StoreError
from capd.store.disk.layout import shard_path
from capd.store.format.frames import RecordHead, SeriesHeader
from capd.store.format.log_places import log_of, log_path, offset_of
from capd.store.read.node import NodeView
from capd.store.read.shard_file import FileCache, Place, ShardFile, is_same_series
from capd.store.remote.locate import RemotePlace
from capd.store.remote.moved_objects import MovedObjects, MovedRecords
from capd.store.scan.moved_shard import MAX_STUB_NBYTES, MovedShard, read_stub
from capd.store.scan.published import read_shape
from capd.store.shards.small_log import read_small

__all__ = ["Located", "Locator"]

# Enough for log → partial → sealed, and for a new shard file at each continuation during the search.
_ATTEMPTS = 5


class Located(NamedTuple):
    """The place of a record. places: its chunks in `file`, by ordinal. raw: the bytes of a logged record instead."""

    file: ShardFile
    places: Mapping[int, Place]
    raw: bytes | None = None


Found: TypeAlias = Located | MovedShard


class Locator:
    """The search for records of one series of one node."""

    def __init__(self, node: NodeView, header: SeriesHeader, files: FileCache, objects: MovedObjects) -> None:
        self._node, self._header, self._files = node, header, files
        self._moved = MovedRecords(header, objects)
        # The paths of shards. Joining them for each read would cost as much as a small read.
        self._paths: dict[int, str] = {}

    def renew(self, number: int) -> bool:
        """Return whether the file of a record has changed since it was read. A file that is open never changes."""
        return False

    def prepare(self, numbers: Sequence[int], ordinals: tuple[int, ...], wanted: Collection[int]) -> None:
        """Prepare the reading of several records of one shape. Files need none, but for those that were moved."""
        self._moved.prepare(numbers, ordinals, wanted)

    def find(
        self, number: int, record: RecordHead, ordinals: tuple[int, ...], wanted: Collection[int] = ()
    ) -> Located | RemotePlace:
        """Find a record.

        Args:
            number: The record's number in its series.
            record: The capture that the catalog names.
            ordinals: All chunks of the record.
            wanted: The chunks that will be read. Only those of a moved shard are fetched here.

        Raises:
            RemovedRun: The run or the series was removed since the view was made.
            DamagedRecord: No file holds the record undamaged.
            StoreError: A file cannot be read.
        """
        for _ in range(_ATTEMPTS):
            for look in (self._in_log, self._in_partial, self._in_sealed):
                found = look(number, record, ordinals)
                if isinstance(found, MovedShard):
                    return self._moved.find(found, number, record, ordinals, wanted)
                if found is not None:
                    return found
            self._node.look_again()
        self._node.check_removal(self._header.path)
        path = self._shard(number)[1]
        raise self.damage(number, "no COMMIT frame there or in the spool names it", path)

    def damage(self, number: int, what: object, file: object) -> DamagedRecord:
        """Return the error for a damaged record in a file."""
        return DamagedRecord(
            f"{self._header.path}#{number} in {file}: {what}; `capd verify` lists all damage"
        )

    def failure(self, number: int, error: OSError, file: object) -> StoreError:
        """Return the error for a file that cannot be read."""
        return StoreError(f"cannot read {self._header.path}#{number} in {file}: {error}")

    def _guarded(self, number: int, file: str, look: Callable[[], Found | None]) -> Found | None:
        try:
            return look()
        except FileNotFoundError:
            return None
        except DamagedRecord as error:
            raise self.damage(number, error, file) from error
        except OSError as error:
            raise self.failure(number, error, file) from error

    def _in_log(self, number: int, record: RecordHead, _: tuple[int, ...]) -> Found | None:
        spooled = self._node.spooled.get(self._header.path)
        place = None if spooled is None else spooled.places.get((record.client, record.sequence))
        if place is None:
            return None
        path = str(log_path(self._node.spool.directory, log_of(place)))

        def look() -> Located:
            file = self._files.open(path)
            raw, commit, _ = read_small(file.fd, offset_of(place))
            row = commit.rows[0]
            if row.capture != record.capture or len(raw) != record.nbytes:
                raise DamagedRecord(f"byte {offset_of(place)} holds another record")
            return Located(file, {}, raw)

        return self._guarded(number, path, look)

    def _in_partial(self, number: int, record: RecordHead, ordinals: tuple[int, ...]) -> Found | None:
        geometry = self._header.geometry
        spooled = self._node.spooled.get(self._header.path)
        if spooled is None or number // geometry.shard_records not in spooled.shards:
            return None
        path, scanned = spooled.shards[number // geometry.shard_records]
        row = scanned.rows.get(number)
        if row is None:
            return None

        def look() -> Located:
            if not is_same_series(scanned.header, self._header):
                raise DamagedRecord("its HEADER frame and the catalog describe different series")
            if row.capture != record.capture:
                raise DamagedRecord("its COMMIT frame and the catalog name different captures")
            slots = {ordinal: geometry.slot(number, ordinal) for ordinal in ordinals}
            if not scanned.index.keys() >= set(slots.values()):
                raise DamagedRecord("no COMMIT frame names one of its chunks")
            places = {ordinal: scanned.index[slot] for ordinal, slot in slots.items()}
            return Located(self._files.open(str(path)), places)

        return self._guarded(number, str(path), look)

    def _in_sealed(self, number: int, record: RecordHead, ordinals: tuple[int, ...]) -> Found | None:
        geometry, header = self._header.geometry, self._header
        shard, path = self._shard(number)

        def look() -> Found | None:
            file = self._files.open(path)
            belongs = file.belongs_to(header, shard)
            if belongs is None and (moved := self._stub(file)) is not None:
                return moved
            if belongs is False:
                raise DamagedRecord("its HEADER frame and the catalog describe different shards")
            slots = {ordinal: geometry.slot(number, ordinal) for ordinal in ordinals}
            places = file.places(slots, header, shard)
            found = file.committed(number, list(places.values()), header, shard)
            if found is None and not self._is_published(number, file):
                # This file is older than the record, or it lost the COMMIT.
                return None
            known = slots.values()
            if found is not None and (found.capture != record.capture or not found.slots.issuperset(known)):
                raise DamagedRecord("its COMMIT frame and the catalog name different captures")
            if len(places) < len(slots):
                raise DamagedRecord("the shard's index lacks a chunk of it")
            return Located(file, places)

        return self._guarded(number, path, look)

    def _stub(self, file: ShardFile) -> MovedShard | None:
        """Return where a shard was moved to; None if the file is no stub."""
        key = Path(file.path).relative_to(self._node.run).as_posix()
        return read_stub(file.read((0, MAX_STUB_NBYTES)), key)

    def _is_published(self, number: int, file: ShardFile) -> bool:
        """Return whether plain Zarr readers see the record in exactly this file.

        This is enough if another program rewrote the shard, or if the COMMIT is damaged: index and chunk have their own
        checksums. Without the index, an older copy of a shared chunk could be mistaken for the newest one. The shape is
        published after the shard gets its name. Hence the shape is read first and the name is checked second.
        """
        if not file.has_index:
            return False
        try:
            count = read_shape(self._node.run / self._header.path)[0]
        except DamagedRecord:
            return False
        return number < count and self._files.open(file.path) is file

    def _shard(self, number: int) -> tuple[int, str]:
        """Return number and path of the sealed shard of a record."""
        shard = number // self._header.geometry.shard_records
        path = self._paths.get(shard)
        if path is None:
            path = self._paths[shard] = str(shard_path(self._node.run, self._header, shard))
        return shard, path
