"""The writing state of one series: its next record number, its open shard, its pending small records."""

from __future__ import annotations

from dataclasses import dataclass, field

from capd.store.catalog.rows import SeriesRow
from capd.store.format.codecs import Chain, chain_for
from capd.store.format.frames import RecordRow, SeriesHeader
from capd.store.format.geometry import Geometry
from capd.store.format.log_places import Waiting
from capd.store.shards.writer import ShardWriter

__all__ = ["Plan", "SeriesState"]


@dataclass(slots=True)
class SeriesState:
    """The writing state of one series; owned by the append thread.

    Attributes:
        row: The totals that the catalog mirrors.
        in_shards: The number of records in shard files. All later records are pending in the small log.
        waiting: The places of the pending records.
        shard: The open shard, if there is one.
    """

    row: SeriesRow
    in_shards: int = 0
    waiting: Waiting = field(default_factory=Waiting)
    shard: ShardWriter | None = None

    @property
    def header(self) -> SeriesHeader:
        """The key, dtype, geometry and path."""
        return self.row.header

    @property
    def geometry(self) -> Geometry:
        """The chunk grid."""
        return self.row.header.geometry

    @property
    def chain(self) -> Chain:
        """The codec chain."""
        return chain_for(self.header.codec, self.header.dtype)

    @property
    def is_full(self) -> bool:
        """Whether the open shard has reached its number of records."""
        shard = self.shard
        return shard is not None and self.in_shards == (shard.number + 1) * self.geometry.shard_records

    def count(self, record: RecordRow) -> None:
        """Count a newly committed record."""
        row = self.row
        row.records += 1
        row.raw_bytes += record.nbytes
        if record.shape != row.max_shape:
            old = row.max_shape or record.shape
            row.max_shape = tuple(max(pair) for pair in zip(old, record.shape, strict=True))


@dataclass(slots=True)
class Plan:
    """The encoding of records of one key, dtype and range of shapes. It is known before the series exists on disk.

    Attributes:
        header: The series. Its path is only desired until `series` is set.
        series: The state of the series, once it exists on disk.
        is_small: Whether records go through the small log.
    """

    header: SeriesHeader
    series: SeriesState | None = None
    is_small: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_small = self.header.geometry.is_small

    @property
    def geometry(self) -> Geometry:
        """The chunk grid."""
        return self.header.geometry

    @property
    def chain(self) -> Chain:
        """The codec chain."""
        return chain_for(self.header.codec, self.header.dtype)
