"""From a record's bytes to encoded inner chunks and statistics: pure functions that the encode pool runs."""

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
    """A record as an array, in memory or on a disk."""

    def __getitem__(self, slices: tuple[slice, ...], /) -> NDArray[np.generic]:
        """The elements between the slices, one per axis. May raise OSError."""


class ChunkResult(NamedTuple):
    """One encoded chunk of a record, and the statistics of the record's elements in it."""

    ordinal: int
    encoded: Encoded
    raw_nbytes: int
    stats: StatsRow | None


def as_array(
    data: memoryview | bytes, stored: np.dtype[np.generic], shape: tuple[int, ...]
) -> NDArray[np.generic]:
    """A record's bytes (C order) as an array of its stored dtype; no copy."""
    return np.frombuffer(data, dtype=stored).reshape(shape)


def pieces(nbytes: int, itemsize: int) -> Iterator[tuple[slice]]:
    """Slices of CHUNK_NBYTES, the last one shorter, into the elements of a record of `nbytes`."""
    elements, count = nbytes // itemsize, CHUNK_NBYTES // itemsize
    return ((slice(at, min(at + count, elements)),) for at in range(0, elements, count))


def summarise_piece(record: SliceSource, slices: tuple[slice, ...], dtype: str) -> StatsRow:
    """Statistics of a part of a record of torch dtype `dtype`."""
    return summarise(record[slices], dtype)


def encode_chunk(
    record: SliceSource,
    ordinal: int,
    slices: tuple[slice, ...],
    geometry: Geometry,
    chain: Chain,
    dtype: str | None,
) -> ChunkResult:
    """Encode one inner chunk of a large record, padding it with zeros where the record ends inside it.

    dtype: torch dtype to compute statistics for, or None for none.
    """
    block = record[slices]
    chunk = whole_chunk(block, geometry)
    if block.shape == chunk.shape:
        block = chunk  # contiguous in any case
    return ChunkResult(ordinal, chain.encode(chunk), chunk.nbytes, summarise(block, dtype) if dtype else None)


def whole_chunk(block: NDArray[np.generic], geometry: Geometry) -> NDArray[np.generic]:
    """`block` as a contiguous inner chunk, with zeros where the record ends inside it."""
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
    """Encode the chunk that small records share. records: one array where each of them fills its part of the chunk.
    held: the chunk so far, whose first `at` records stay."""
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
    """Statistics of small records (torch dtype, raw bytes): one vectorised pass over all of one dtype and size."""
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
