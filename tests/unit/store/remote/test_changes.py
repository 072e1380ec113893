"""A reader of an object store while the upload goes on: continued shards, newer manifests, segments that are gone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import capd
from capd.errors import ObjectStoreError
from capd.store.objects.address import Address, parse_address
from capd.store.objects.bucket import Bucket
from tests.kit.objects.uploaded import publish
from tests.kit.store.writing import Writer, key

LARGE, SMALL = (1024, 1500), (3, 5)


def grown(root: Path, first: int, last: int) -> Path:
    """A run to which more records of the same series were added; it is sealed again."""
    writer = Writer(root)
    writer.sequence = 2 * first
    for iteration in range(first, last):
        for name, shape in (("large", LARGE), ("small", SMALL)):
            bits = np.random.default_rng(iteration).standard_normal(shape).astype("f4")
            writer.put(key(name), "float32", bits, iteration=iteration)
    writer.close()
    return writer.run


def values_of(store: capd.Store) -> dict[str, list[bytes]]:
    """The elements of each series."""
    return {one.key.tensor_name: [one.numpy(i).tobytes() for i in range(len(one))] for one in store.series}


@pytest.mark.parametrize("was_read", [False, True])
def test_a_shard_that_was_continued_has_the_same_records(
    tmp_path: Path, prefix: Address, was_read: bool
) -> None:
    run = grown(tmp_path, 0, 3)
    wanted = values_of(capd.open(run))
    place = publish(run, prefix)
    before = capd.open(place)
    if was_read:
        assert {one.key.tensor_name: one.numpy(0).tobytes() for one in before.series} == {
            name: found[0] for name, found in wanted.items()
        }
    else:
        assert len(before.series) == 2  # the segment is read, no shard
    publish(grown(tmp_path, 3, 6), prefix)
    assert values_of(before) == wanted
    before.refresh()
    assert values_of(before) == values_of(capd.open(run))
    assert [len(one) for one in before.series] == [6, 6]


def test_records_whose_chunks_moved_are_read_together(tmp_path: Path) -> None:
    """Small records share chunks. A continued shard is compacted, and its chunks move."""

    def small(first: int, last: int) -> Path:
        writer = Writer(tmp_path / "here")
        writer.sequence = first
        for number in range(first, last):
            bits = np.random.default_rng(number).standard_normal((60, 50)).astype("f4")
            writer.put(key("small"), "float32", bits, iteration=number)
        writer.close()
        return writer.run

    there = parse_address(f"file://{tmp_path}/there")
    # More than 4 MiB: a smaller shard is fetched as a whole.
    [before] = capd.open(publish(small(0, 605), there)).series
    assert before.numpy(3).any()  # the index is read
    run = small(605, 608)
    publish(run, there)
    chosen = slice(590, 605)
    np.testing.assert_array_equal(before.stack(chosen), capd.open(run).series[0].stack(chosen))


@pytest.mark.parametrize("was_read", [False, True])
def test_a_manifest_whose_segments_are_gone_is_read_again(
    tmp_path: Path, prefix: Address, was_read: bool
) -> None:
    run = grown(tmp_path, 0, 3)
    wanted = values_of(capd.open(run))
    bucket = Bucket(publish(run, prefix))
    before = capd.open(bucket.address)
    if was_read:
        assert len(before.series) == 2
    publish(grown(tmp_path, 3, 6), prefix)
    old = [one.key for one in bucket.listing(".capd/") if "-00000001" in one.key]
    assert len(old) == 2
    bucket.delete(old)
    found = values_of(before)
    # A view that had read its series keeps their records; another one shows the newer manifest.
    assert {name: each[:3] for name, each in found.items()} == wanted
    assert {len(each) for each in found.values()} == {3 if was_read else 6}


def test_a_segment_that_no_newer_manifest_replaces_is_an_error(tmp_path: Path, prefix: Address) -> None:
    bucket = Bucket(publish(grown(tmp_path, 0, 1), prefix))
    store = capd.open(bucket.address)
    bucket.delete([".capd/node=n0/series-00000001.parquet"])
    with pytest.raises(ObjectStoreError, match=r"series-00000001\.parquet: there is no such object"):
        _ = store.series


def test_a_refresh_asks_once_if_nothing_changed(tmp_path: Path, prefix: Address) -> None:
    run = grown(tmp_path, 0, 2)
    store = capd.open(publish(run, prefix))
    bucket = store._source.bucket
    assert len(store.series) == 2
    for _ in range(3):
        before = bucket.requests
        store.refresh()
        assert bucket.requests == before + 1
        assert [len(one) for one in store.series] == [2, 2]
    publish(grown(tmp_path, 2, 3), prefix)
    store.refresh()
    assert [len(one) for one in store.series] == [3, 3]
