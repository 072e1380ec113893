"""From a record's bytes to encoded inner chunks and statistics: pure functions that the encode pool runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capd.store.codecs import Chain
from capd.store.frames import StatsRow
from capd.store.geometry import Geometry
from capd.store.statistics import summarise, summarise_rows

__all__ = ["ChunkResult", "as_array", "encode_batch", "encode_chunk", "summarise_records"]


class ChunkResult(NamedTuple):
    """One encoded chunk of a record, and the statistics of the record's elements in it."""

    ordinal: int
    payload: bytes
    raw_nbytes: int
    stats: StatsRow | None


def as_array(
    data: memoryview | bytes, stored: np.dtype[np.generic], shape: tuple[int, ...]
) -> NDArray[np.generic]:
    """A record's bytes (C order) as an array of its stored dtype; no copy."""
    return np.frombuffer(data, dtype=stored).reshape(shape)


def encode_chunk(
    record: NDArray[np.generic],
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
    chunk = block
    if block.shape != geometry.chunk:
        chunk = np.zeros(geometry.chunk, dtype=record.dtype)
        chunk[tuple(slice(0, n) for n in block.shape)] = block
    payload = chain.encode(np.ascontiguousarray(chunk))
    return ChunkResult(ordinal, payload, chunk.nbytes, summarise(block, dtype) if dtype else None)


def encode_batch(
    records: Sequence[NDArray[np.generic]],
    at: int,
    held: NDArray[np.generic] | None,
    geometry: Geometry,
    chain: Chain,
) -> bytes:
    """Encode the chunk that small records share. `held`: the chunk so far, whose first `at` records stay."""
    chunk = np.zeros((geometry.batch, *geometry.chunk), dtype=chain.stored)
    if held is not None:
        chunk[:at] = held[:at]
    for row, record in enumerate(records, at):
        place: tuple[int | slice, ...] = (row, *(slice(0, n) for n in record.shape))
        chunk[place] = record
    return chain.encode(chunk)


def summarise_records(records: Sequence[NDArray[np.generic]], dtype: str) -> list[StatsRow]:
    """Statistics of small records: one vectorised pass where they have one shape."""
    if len({record.shape for record in records}) == 1:
        return summarise_rows(np.stack(records).reshape(len(records), -1), dtype)
    return [summarise(record, dtype) for record in records]
