"""Reads records whose shard was moved: the stub in the place of the shard names the object that has them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from capd.errors import CapdError, DamagedRecord, StoreError
from capd.store.format.frames import RecordHead, SeriesHeader
from capd.store.objects.address import Address
from capd.store.objects.bucket import Bucket
from capd.store.remote.locate import RemoteLocator, RemotePlace
from capd.store.remote.shard import RemoteShard
from capd.store.remote.windows import WindowCache
from capd.store.scan.moved_shard import MovedShard
from capd.store.segments.series_table import ShardObject

__all__ = ["MovedObjects", "MovedRecords"]


@dataclass(slots=True)
class MovedObjects:
    """The object stores to which shards of a run were moved. All series of a Store share them."""

    _open: dict[Address, tuple[Bucket, WindowCache]] = field(default_factory=dict)

    def shard(self, number: int, moved: MovedShard) -> RemoteShard:
        """Return a moved shard.

        Raises:
            CapdError: The extra `store` is not installed.
        """
        found = self._open.get(moved.to)
        if found is None:
            bucket = Bucket(moved.to, is_new=False)
            found = self._open[moved.to] = (bucket, WindowCache(bucket))
        return RemoteShard(*found, moved.key, ShardObject(number, moved.nbytes, moved.crc32c))


class MovedRecords:
    """The search for records of one series in its moved shards."""

    def __init__(self, header: SeriesHeader, objects: MovedObjects) -> None:
        self._header, self._objects = header, objects
        # The shards that were found to be moved, by number.
        self._moved: dict[int, MovedShard] = {}
        self._locator = RemoteLocator(header, lambda shard: objects.shard(shard, self._moved[shard]))

    def find(
        self,
        moved: MovedShard,
        number: int,
        record: RecordHead,
        ordinals: tuple[int, ...],
        wanted: Collection[int],
    ) -> RemotePlace:
        """Find a record in a moved shard, and fetch the wanted chunks.

        Raises:
            DamagedRecord: The object is missing, or does not hold the record undamaged.
            StoreError: The object cannot be read. The message says where it is, and what to do.
        """
        shard = number // self._header.geometry.shard_records
        before = self._moved.setdefault(shard, moved)
        if before != moved:
            # Somebody wrote another stub.
            self._moved = {shard: moved}
            self._locator = RemoteLocator(self._header, lambda at: self._objects.shard(at, self._moved[at]))
        what = f"{self._header.path}#{number} was moved to {moved.address}"
        try:
            return self._locator.find(number, record, ordinals, wanted)
        except DamagedRecord as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise DamagedRecord(
                    f"{what}, but there is no such object; `capd verify {moved.to}` lists all damage"
                ) from error
            raise
        except CapdError as error:
            why = error.__cause__ if isinstance(error.__cause__, CapdError) else error
            raise StoreError(f"{what}: {why}", retry=getattr(error, "retry", False)) from error

    def prepare(self, numbers: Sequence[int], ordinals: tuple[int, ...], wanted: Collection[int]) -> None:
        """Fetch chunks of several records together, of the shards that are known to be moved."""
        if self._moved:
            per_shard = self._header.geometry.shard_records
            inside = [number for number in numbers if number // per_shard in self._moved]
            self._locator.prepare(inside, ordinals, wanted)
