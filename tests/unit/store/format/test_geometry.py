"""Chunk grids: every element in exactly one chunk, slots unique, sizes as designed."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capd.store.format.geometry import BATCH_NBYTES, CHUNK_NBYTES, SMALL_NBYTES, grown, plan_geometry

LONGEST = {0: 0, 1: 1 << 24, 2: 4096, 3: 256, 4: 64}  # axis length by ndim: at most 2^24 elements
shapes = st.sampled_from(sorted(LONGEST)).flatmap(
    lambda ndim: st.tuples(*[st.integers(0, LONGEST[ndim])] * ndim)
)


@given(shapes, st.sampled_from([1, 2, 4, 8]))
def test_chunks_cover_every_element_once(shape: tuple[int, ...], itemsize: int) -> None:
    geometry = plan_geometry(shape, itemsize, 64 << 20)
    assert geometry.fits(shape)
    if prod(shape) > 1 << 20:
        return
    seen = np.zeros(shape, dtype=np.uint8)
    ordinals = []
    for ordinal, slices in geometry.chunks(shape):
        seen[slices] += 1
        ordinals.append(ordinal)
    assert (seen == 1).all()
    assert len(set(ordinals)) == len(ordinals)
    assert all(0 <= ordinal < geometry.chunks_per_batch for ordinal in ordinals)


@given(shapes, st.sampled_from([1, 2, 4, 8]))
def test_chunks_and_shards_have_the_designed_sizes(shape: tuple[int, ...], itemsize: int) -> None:
    geometry = plan_geometry(shape, itemsize, 64 << 20)
    chunk_nbytes = prod(geometry.chunk) * geometry.batch * itemsize
    record_nbytes = prod(geometry.extents) * itemsize
    assert chunk_nbytes <= max(CHUNK_NBYTES, BATCH_NBYTES)
    assert all(extent % chunk == 0 for extent, chunk in zip(geometry.extents, geometry.chunk, strict=True))
    assert geometry.shard_records % geometry.batch == 0
    assert geometry.is_small == (record_nbytes < SMALL_NBYTES)
    assert geometry.shard_records == 1 or geometry.shard_records * record_nbytes <= 64 << 20
    slots = {geometry.slot(record, 0) for record in range(0, geometry.shard_records, geometry.batch)}
    assert len(slots) == geometry.shard_records // geometry.batch
    assert max(slots) < geometry.shard_slots


def test_the_inner_chunk_is_full_from_the_right() -> None:
    geometry = plan_geometry((3, 1000, 4096), 2, 512 << 20)

    assert geometry.chunk == (1, 512, 4096)
    assert geometry.grid == (3, 2, 1)


@pytest.mark.parametrize(
    ("shape", "itemsize", "extents", "chunk"),
    [
        ((1408, 512), 2, (1536, 512), (1536, 512)),  # 11 half planes
        ((1408, 512), 4, (1536, 512), (1536, 512)),
        ((512, 1408), 2, (512, 1536), (512, 1536)),
        ((4, 512, 1408), 2, (4, 512, 1408), (2, 512, 1408)),  # whole
        ((1100, 512), 2, (1100, 512), (1100, 512)),  # 1,280 rows are too many more
        ((1408, 512), 1, (1408, 512), (1408, 512)),  # nothing to shuffle
        ((120, 1024), 2, (120, 1024), (120, 1024)),  # small
        ((4000, 2048), 2, (4096, 2048), (1024, 2048)),
        ((3, 5000, 4096), 2, (3, 5120, 4096), (1, 512, 4096)),
    ],
)
def test_chunks_grow_to_whole_byte_planes(
    shape: tuple[int, ...], itemsize: int, extents: tuple[int, ...], chunk: tuple[int, ...]
) -> None:
    geometry = plan_geometry(shape, itemsize, 512 << 20)
    bare = plan_geometry(shape, itemsize, 512 << 20, compressed=False)

    assert (geometry.extents, geometry.chunk) == (extents, chunk)
    assert prod(bare.extents) - prod(shape) < max(shape)


def shape_of(ndim: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(0, 500)] * ndim)


@given(st.integers(0, 4).flatmap(lambda ndim: st.tuples(shape_of(ndim), shape_of(ndim))))
def test_a_grown_variant_holds_the_record(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    first, second = pair
    extents = plan_geometry(first, 2, 64 << 20).extents
    assert plan_geometry(grown(extents, second), 2, 64 << 20).fits(second)
