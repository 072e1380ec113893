"""Finds records of an object store: in sealed shards alone, which the manifest names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from capd.errors import DamagedRecord, ObjectStoreError, StoreError
from capd.store.format.frames import UNKNOWN_CLIENT, RecordHead, SeriesHeader
from capd.store.remote.shard import RemoteShard, ShardWindows

__all__ = ["RemoteLocator", "RemotePlace"]

_AHEAD_NBYTES = 64 << 20


class RemotePlace(NamedTuple):
    """The place of a record in an object store. places: its chunks by ordinal. raw: as of a logged record; None."""

    file: ShardWindows
    places: Mapping[int, tuple[int, int]]
    raw: bytes | None = None


class RemoteLocator:
    """The search for records of one series in an object store."""

    def __init__(self, header: SeriesHeader, shard: Callable[[int], RemoteShard]) -> None:
        """Prepare the search. shard: a function that returns the shard of a number."""
        self._header, self._shard_of = header, shard
        self._shards: dict[int, RemoteShard] = {}

    def find(
        self, number: int, record: RecordHead, ordinals: tuple[int, ...], wanted: Collection[int]
    ) -> RemotePlace:
        """Find a record, and fetch the wanted chunks.

        Args:
            number: The record's number in its series.
            record: The capture that the segment names.
            ordinals: All chunks of the record.
            wanted: The chunks to fetch.

        Raises:
            DamagedRecord: The shard does not hold the record undamaged.
            StoreError: The shard cannot be read.
        """
        shard = self._shard(number)
        try:
            return self._in_shard(shard, number, record, ordinals, wanted)
        except DamagedRecord as error:
            raise self.damage(number, error, shard.path) from error
        except FileNotFoundError as error:
            raise self.damage(
                number, "the manifest names it, but there is no such object", shard.path
            ) from error
        except ObjectStoreError as error:
            raise StoreError(
                f"cannot read {self._header.path}#{number}: {error}", retry=error.retry
            ) from error

    def prepare(self, numbers: Sequence[int], ordinals: tuple[int, ...], wanted: Collection[int]) -> None:
        """Fetch chunks of several records of one shape together, as far as the cache keeps them until they are read.

        A failure is left to the reading of its record.
        """
        of_shard: dict[int, list[int]] = {}
        for number in numbers:
            of_shard.setdefault(number // self._header.geometry.shard_records, []).append(number)
        room = _AHEAD_NBYTES
        for at, inside in of_shard.items():
            with contextlib.suppress(StoreError):
                room -= self._prepare(at, inside, ordinals, wanted, room)

    def _prepare(
        self, at: int, numbers: Sequence[int], ordinals: tuple[int, ...], wanted: Collection[int], room: int
    ) -> int:
        """Fetch the chunks of records in one shard, and return their bytes; of at most `room` bytes."""
        geometry, shard = self._header.geometry, self._shard(numbers[0])
        chunks: dict[tuple[int, int], None] = {}
        for number in numbers:
            slots = {ordinal: geometry.slot(number, ordinal) for ordinal in ordinals}
            places = shard.places(slots, self._header, at)
            chunks |= dict.fromkeys(places[one] for one in wanted if one in places)
            if places:
                chunks[max(places.values())] = None
            if sum(nbytes for _, nbytes in chunks) > room:
                break
        shard.fetch(chunks, None)
        return sum(nbytes for _, nbytes in chunks)

    def renew(self, number: int) -> bool:
        """Return whether the shard of a record has changed since it was read. It is then read again."""
        shard = self._shards.get(number // self._header.geometry.shard_records)
        return shard is not None and shard.renew()

    def damage(self, number: int, what: object, file: object) -> DamagedRecord:
        """Return the error for a damaged record in an object."""
        return DamagedRecord(
            f"{self._header.path}#{number} in {file}: {what}; `capd verify` lists all damage"
        )

    def failure(self, number: int, error: OSError, file: object) -> StoreError:
        """Return the error for an object that cannot be read."""
        return StoreError(f"cannot read {self._header.path}#{number} in {file}: {error}")

    def _in_shard(
        self,
        shard: RemoteShard,
        number: int,
        record: RecordHead,
        ordinals: tuple[int, ...],
        wanted: Collection[int],
    ) -> RemotePlace:
        geometry, header = self._header.geometry, self._header
        at = number // geometry.shard_records
        slots = {ordinal: geometry.slot(number, ordinal) for ordinal in ordinals}
        places = shard.places(slots, header, at)
        last = max(places.values(), default=None)
        windows = shard.fetch([places[one] for one in wanted if one in places], last)
        found = shard.committed(number, windows, last, header, at)
        # Index and chunk have checksums of their own, as for a shard that a Zarr tool has written again. An older
        # version of the object has zeros for the records that joined the chunk later.
        if found is None and (not shard.has_index or shard.is_other_version):
            raise DamagedRecord("no COMMIT frame names it")
        if found is not None and not (_is_capture(found[0], record) and found[1].issuperset(slots.values())):
            raise DamagedRecord("its COMMIT frame and the segment name different captures")
        if len(places) < len(slots):
            raise DamagedRecord("the shard's index lacks a chunk of it")
        return RemotePlace(windows, places)

    def _shard(self, number: int) -> RemoteShard:
        at = number // self._header.geometry.shard_records
        found = self._shards.get(at)
        if found is None:
            found = self._shards[at] = self._shard_of(at)
        return found


def _is_capture(found: tuple[bytes, int, tuple[int, ...]], record: RecordHead) -> bool:
    """Return whether a COMMIT names a record. A catalog that was lost may know only the record's moment and shape."""
    if record.client == UNKNOWN_CLIENT:
        return found[2] == record.shape
    return found == record.capture
