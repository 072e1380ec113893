"""The encoding of a record's bytes into inner chunks and statistics: pure functions for the encode pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from capd.store.format.codecs import Chain, Encoded
from capd.store.format.dtypes import stored_type
from capd.store.format.frames import StatsRow
from capd.store.format.geometry import CHUNK_NBYTES, Geometry
from capd.store.format.statistics import summarise, summarise_rows

__all__ = [
    "ChunkResult",
    "SliceSource",
    "as_array",
    "encode_batch",
    "encode_chunk",
    "pieces",
    "summarise_piece",
    "summarise_small",
    "whole_chunk",
]


class SliceSource(Protocol):
    """A record as an array, in memory or on disk."""

    def __getitem__(self, slices: tuple[slice, ...], /) -> NDArray[np.generic]:
        """Return the elements between the slices, one slice per axis. May raise OSError."""


class ChunkResult(NamedTuple):
    """An encoded chunk of a record, and the statistics of the record's elements in it."""

    ordinal: int
    encoded: Encoded
    raw_nbytes: int
    stats: StatsRow | None


def as_array(
    data: memoryview | bytes, stored: np.dtype[np.generic], shape: tuple[int, ...]
) -> NDArray[np.generic]:
    """Return a record's bytes (C order) as an array of its stored dtype, without a copy."""
    return np.frombuffer(data, dtype=stored).reshape(shape)


def pieces(nbytes: int, itemsize: int) -> Iterator[tuple[slice]]:
    """Yield slices into the elements of a record of `nbytes`. A slice has CHUNK_NBYTES; the last one may be shorter."""
    elements, count = nbytes // itemsize, CHUNK_NBYTES // itemsize
    return ((slice(at, min(at + count, elements)),) for at in range(0, elements, count))


def summarise_piece(record: SliceSource, slices: tuple[slice, ...], dtype: str) -> StatsRow:
    """Return the statistics of a part of a record of torch dtype `dtype`."""
    return summarise(record[slices], dtype)


def encode_chunk(
    record: SliceSource,
    ordinal: int,
    slices: tuple[slice, ...],
    geometry: Geometry,
    chain: Chain,
    dtype: str | None,
) -> ChunkResult:
    """Encode one inner chunk of a large record, padded with zeros where the record ends inside it.

    Args:
        record: The record.
        ordinal: The chunk's number in the record's grid.
        slices: The record's elements in this chunk.
        geometry: The chunk grid of the series.
        chain: The codec chain of the series.
        dtype: The torch dtype for the statistics, or None for no statistics.

    Raises:
        OSError: The record cannot be read.
    """
    block = record[slices]
    chunk = whole_chunk(block, geometry)
    if block.shape == chunk.shape:
        # The chunk is always contiguous.
        block = chunk
    return ChunkResult(ordinal, chain.encode(chunk), chunk.nbytes, summarise(block, dtype) if dtype else None)


def whole_chunk(block: NDArray[np.generic], geometry: Geometry) -> NDArray[np.generic]:
    """Return `block` as a contiguous inner chunk, padded with zeros where the record ends inside it."""
    if block.shape == geometry.chunk:
        return np.ascontiguousarray(block)
    chunk = np.zeros(geometry.chunk, dtype=block.dtype)
    chunk[tuple(slice(0, n) for n in block.shape)] = block
    return chunk


def encode_batch(
    records: Sequence[NDArray[np.generic]] | NDArray[np.generic],
    at: int,
    held: NDArray[np.generic] | None,
    geometry: Geometry,
    chain: Chain,
) -> Encoded:
    """Encode the chunk that several small records share.

    Args:
        records: The new records; one array if each of them fills its part of the chunk.
        at: The position of the first new record in the chunk.
        held: The current chunk, whose first `at` records are kept; None if there is none.
        geometry: The chunk grid of the series.
        chain: The codec chain of the series.
    """
    if isinstance(records, np.ndarray) and len(records) == geometry.batch:
        return chain.encode(records)
    chunk = np.zeros((geometry.batch, *geometry.chunk), dtype=chain.stored)
    if held is not None:
        chunk[:at] = held[:at]
    if isinstance(records, np.ndarray):
        chunk[at : at + len(records)] = records
        return chain.encode(chunk)
    for row, record in enumerate(records, at):
        place: tuple[int | slice, ...] = (row, *(slice(0, n) for n in record.shape))
        chunk[place] = record
    return chain.encode(chunk)


def summarise_small(records: Sequence[tuple[str, bytes]]) -> list[StatsRow]:
    """Return the statistics of small records (torch dtype, raw bytes).

    All records of one dtype and size share one vectorised pass.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    for position, (dtype, data) in enumerate(records):
        groups.setdefault((dtype, len(data)), []).append(position)
    found: list[StatsRow] = [StatsRow()] * len(records)
    for (dtype, nbytes), positions in groups.items():
        if nbytes == 0:
            continue
        rows = b"".join([records[position][1] for position in positions])
        bits = np.frombuffer(rows, dtype=stored_type(dtype).stored).reshape(len(positions), -1)
        for position, stats in zip(positions, summarise_rows(bits, dtype), strict=True):
            found[position] = stats
    return found
