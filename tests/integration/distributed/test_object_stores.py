"""Runs in an object store are read by workers as by threads; a check of one stays in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.cluster.dask_cluster import said
from tests.kit.cluster.sources import varied_run
from tests.kit.objects.service import Bucket
from tests.kit.store.cli import run_capd

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


def test_a_check_of_a_run_in_an_object_store_is_refused_to_workers(bucket: Bucket, address: str) -> None:
    result = run_capd("verify", address, *CLUSTER, **bucket.environment())

    assert (result.code, result.out) == (2, "")
    assert "a run in an object store is checked by threads" in result.err
