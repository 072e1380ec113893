"""The chunk grid of a series: pure arithmetic from the first record's shape to chunks, shards and slots.

Inner chunks are filled from the last axis. The first axis whose inner product exceeds CHUNK_NBYTES is split into equal
parts. The axes to its left have chunk length 1.

A chunk whose byte planes are not whole grows by up to an eighth. zstd codes literals in blocks of 128 KiB. A block that
holds two planes mixes the bytes that byte shuffle has separated.

Records smaller than SMALL_NBYTES share chunks of up to BATCH_NBYTES along the record axis. A record never spans two
shard files. Shard extents are the record's extents, rounded up to whole chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil, gcd, prod

import msgspec

__all__ = ["BATCH_NBYTES", "CHUNK_NBYTES", "SMALL_NBYTES", "Geometry", "grown", "plan_geometry"]

CHUNK_NBYTES = 4 << 20
SMALL_NBYTES = 256 << 10
BATCH_NBYTES = 1 << 20
MAX_SHARD_RECORDS = 4096
# The byte planes of a chunk are multiples of this.
_PLANE_NBYTES = 128 << 10
_GROWTH = 1 / 8


class Geometry(msgspec.Struct, frozen=True, array_like=True):
    """The chunk grid of one series.

    Attributes:
        extents: The shard's extent along each record axis.
        chunk: The inner chunk's length along each record axis. It divides the extent.
        batch: The records per chunk: 1 unless records are small.
        shard_records: The records per shard, a multiple of `batch`.
        itemsize: The bytes of a stored element.
    """

    extents: tuple[int, ...]
    chunk: tuple[int, ...]
    batch: int
    shard_records: int
    itemsize: int

    @property
    def is_small(self) -> bool:
        """Whether records go through the node's small log and share chunks."""
        return self.record_nbytes < SMALL_NBYTES

    @property
    def record_nbytes(self) -> int:
        """The bytes of the largest record, not encoded."""
        return prod(self.extents) * self.itemsize

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along each record axis."""
        return tuple(extent // chunk for extent, chunk in zip(self.extents, self.chunk, strict=True))

    @property
    def chunks_per_batch(self) -> int:
        """The number of chunks of one batch of records. A batch is one record unless records are small."""
        return prod(self.grid)

    @property
    def shard_slots(self) -> int:
        """The number of entries in a shard's index."""
        return self.shard_records // self.batch * self.chunks_per_batch

    def slot(self, record: int, ordinal: int) -> int:
        """Return a chunk's index entry within its shard. `ordinal` counts the record's grid in C order."""
        return record % self.shard_records // self.batch * self.chunks_per_batch + ordinal

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a record of this shape can be stored without a new variant."""
        return shape == self.extents or (
            len(shape) == len(self.extents) and all(n <= e for n, e in zip(shape, self.extents, strict=True))
        )

    def chunks(self, shape: tuple[int, ...]) -> Iterator[tuple[int, tuple[slice, ...]]]:
        """Yield (ordinal, slices into the record) of every chunk that holds an element of a record of `shape`."""
        if 0 in shape:
            return
        grid = self.grid
        used = [ceil(n / c) for n, c in zip(shape, self.chunk, strict=True)]
        for position in product(*map(range, used)):
            ordinal = 0
            for count, index in zip(grid, position, strict=True):
                ordinal = ordinal * count + index
            yield (
                ordinal,
                tuple(
                    slice(i * c, min((i + 1) * c, n))
                    for i, c, n in zip(position, self.chunk, shape, strict=True)
                ),
            )


def plan_geometry(
    shape: tuple[int, ...], itemsize: int, shard_nbytes: int, *, compressed: bool = True
) -> Geometry:
    """Return the geometry of a series from the shape of its first record (or from grown extents).

    Args:
        shape: The shape of the record as it is stored.
        itemsize: The bytes of a stored element.
        shard_nbytes: The desired raw size of a shard.
        compressed: Whether the empty part of a chunk takes almost no space. Chunks may then be shared and rounded up.
    """
    extents = [max(1, n) for n in shape]
    chunk = list(extents)
    # The bytes of one step along the current axis.
    inner = itemsize
    for axis in reversed(range(len(extents))):
        if inner * extents[axis] > CHUNK_NBYTES:
            parts = ceil(extents[axis] / max(1, CHUNK_NBYTES // inner))
            chunk[axis] = ceil(extents[axis] / parts)
            extents[axis] = chunk[axis] * parts
            chunk[:axis] = [1] * axis
            break
        inner *= extents[axis]
    if compressed and prod(extents) * itemsize >= SMALL_NBYTES:
        _fill_planes(extents, chunk, itemsize)
    record_nbytes = prod(extents) * itemsize
    batch = 1
    if record_nbytes < SMALL_NBYTES and compressed:
        batch = min(MAX_SHARD_RECORDS, max(1, BATCH_NBYTES // record_nbytes))
    batches = max(1, min(shard_nbytes // (record_nbytes * batch), MAX_SHARD_RECORDS // batch))
    return Geometry(tuple(extents), tuple(chunk), batch, batches * batch, itemsize)


def _fill_planes(extents: list[int], chunk: list[int], itemsize: int) -> None:
    """Lengthen the chunk until its byte planes are whole, if that costs at most an eighth.

    The axis with the least growth is lengthened.
    """
    if itemsize == 1:
        return
    chunk_nbytes = prod(chunk) * itemsize
    choices: list[tuple[float, int, int, int]] = []
    for axis, length in enumerate(chunk):
        step = _PLANE_NBYTES * itemsize // gcd(_PLANE_NBYTES * itemsize, chunk_nbytes // length)
        longer = ceil(length / step) * step
        whole = ceil(extents[axis] / longer) * longer
        if length > 1 and longer * (chunk_nbytes // length) <= CHUNK_NBYTES:
            choices.append((whole / extents[axis], axis, longer, whole))
    if choices:
        growth, axis, longer, whole = min(choices)
        if growth <= 1 + _GROWTH:
            chunk[axis], extents[axis] = longer, whole


def grown(extents: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the extents of a variant that holds `shape`. An axis that overflows grows to the next power of two."""
    return tuple(e if n <= e else 1 << (n - 1).bit_length() for e, n in zip(extents, shape, strict=True))
