"""Runs in an object store are read and checked by workers as by threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.cluster.dask_cluster import said
from tests.kit.cluster.sources import varied_run
from tests.kit.objects.service import Bucket
from tests.kit.store.cli import Result, run_capd

CLUSTER = ("--scheduler", "processes", "--workers", "2", "--task-bytes", "40KiB")


@pytest.fixture
def address(bucket: Bucket, tmp_path: Path) -> str:
    run = varied_run(tmp_path, "there", long=6)
    done = run_capd("upload", run, bucket.url("captures"), **bucket.environment())
    assert done.code == 0, done.err
    return bucket.url("captures/there.zarr")


@pytest.mark.slow
def test_workers_read_a_run_in_an_object_store(bucket: Bucket, address: str) -> None:
    here = run_capd("compare", address, "--json", **bucket.environment())
    there = run_capd("compare", address, "--json", *CLUSTER, **bucket.environment())

    assert (there.code, there.out, said(there.err)) == (here.code, here.out, said(here.err))
    assert here.code == 0


def test_workers_check_a_run_in_an_object_store_as_threads_do(bucket: Bucket, address: str) -> None:
    sound = _check(bucket, address)
    assert sound.code == 0
    shards = sorted(key for key in bucket.keys("captures/") if "/data/c/" in key)
    documents = sorted(key for key in bucket.keys("captures/") if key.endswith("/data/zarr.json"))
    store = bucket.store()
    for key in (shards[0], documents[0]):
        payload = bytearray(store.get(key).bytes())
        payload[len(payload) // 2] ^= 0x10
        store.put(key, bytes(payload))
    store.put(shards[1], bytes(store.get(shards[1]).bytes())[:-7])
    store.delete([shards[2], documents[1]])

    found = _check(bucket, address)
    assert found.code == 4
    for key in (*shards[:3], *documents[:2]):
        assert key.partition(".zarr/")[2] in found.out


def _check(bucket: Bucket, address: str) -> Result:
    here, there = (
        run_capd("verify", address, "--json", *options, **bucket.environment()) for options in ((), CLUSTER)
    )
    assert (there.code, there.out, said(there.err)) == (here.code, here.out, said(here.err))
    return here


def test_a_listing_needs_no_cluster(bucket: Bucket, address: str) -> None:
    result = run_capd("verify", address, "--listing", *CLUSTER, **bucket.environment())

    assert (result.code, result.out) == (2, "")
    assert "--listing reads no shard" in result.err
