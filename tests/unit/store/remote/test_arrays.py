"""The arrays of a run in an object store: by capd, by plain Zarr readers, lazily, and in other processes."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import xarray
import zarr
from zarr.storage import ObjectStore

import capd
from capd.store.objects.address import Address
from capd.store.read.series import Series
from tests.kit.objects.service import Bucket
from tests.kit.objects.uploaded import publish
from tests.kit.store.writing import Writer, key

distributed = pytest.importorskip("distributed")
pytest.importorskip("pyarrow")


@pytest.fixture
def both(tmp_path: Path, prefix: Address) -> tuple[Series, Series]:
    """A series of a local run and of its upload."""
    writer, values = Writer(tmp_path, shard_nbytes=1 << 20), np.random.default_rng(3)
    for iteration in range(12):
        writer.put(
            key("input"), "float32", values.standard_normal((200, 300)).astype("f4"), iteration=iteration
        )
    writer.close()
    place = publish(writer.run, prefix)
    return capd.open(writer.run).series[0], capd.open(place).series[0]


def test_zarr_shows_the_published_records(both: tuple[Series, Series]) -> None:
    local, remote = (one.zarr() for one in both)
    assert isinstance(remote.store, ObjectStore)
    np.testing.assert_array_equal(remote[...], local[...])
    with pytest.raises(ValueError, match=r"read.only"):
        remote[0] = 0


def test_plain_readers_open_the_address(both: tuple[Series, Series], bucket: Bucket, prefix: Address) -> None:
    local, remote = both
    wanted = local.zarr()[...]
    path = f"{prefix.key}/run.zarr/{remote.path}/data"
    np.testing.assert_array_equal(
        zarr.open_array(ObjectStore(bucket.store(), read_only=True), path=path)[...], wanted
    )
    opened = tensorstore.open(
        {
            "driver": "zarr3",
            "kvstore": {
                "driver": "s3",
                "bucket": bucket.name,
                "path": f"{path}/",
                "endpoint": bucket.service.endpoint,
                "aws_region": "us-east-1",
                "aws_credentials": {"type": "environment"},
            },
        },
        read=True,
    ).result()
    np.testing.assert_array_equal(opened.read().result(), wanted)
    group = ObjectStore(bucket.store(prefix=f"{prefix.key}/run.zarr/{remote.path}"), read_only=True)
    data = xarray.open_zarr(group, consolidated=False)["data"]
    np.testing.assert_array_equal(data.values, wanted)


def test_lazy_arrays_read_nothing_before_they_are_used(both: tuple[Series, Series]) -> None:
    local, remote = both
    requests: Any = remote._node._bucket
    labelled, blocks = remote.xarray(), remote.dask()
    before = requests.requests
    assert labelled.shape == blocks.shape == (12, 200, 300)
    assert requests.requests == before
    np.testing.assert_array_equal(labelled[3, 5:9].values, local.values(3)[5:9])
    np.testing.assert_array_equal(blocks[7].compute(scheduler="threads"), local.values(7))
    assert blocks.numblocks[0] > 1


def _where(series: Series) -> tuple[int, bytes]:
    return os.getpid(), series.numpy(5).tobytes()


def test_workers_of_a_cluster_open_the_address_themselves(
    both: tuple[Series, Series], tmp_path: Path
) -> None:
    local, remote = both
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, local_directory=tmp_path, scheduler_kwargs={"dashboard": False}
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        total = remote.dask().sum(axis=0)
        np.testing.assert_array_equal(client.compute(total).result(), local.dask().sum(axis=0).compute())
        process, found = client.submit(_where, remote).result()
        assert process != os.getpid()
        assert found == local.numpy(5).tobytes()
        labelled = remote.xarray().chunk({"record": 4})
        np.testing.assert_array_equal(labelled.max("record").compute(), local.zarr()[...].max(0))


@pytest.mark.parametrize("attempt", ["latest", "all"])
def test_a_series_in_another_process_is_the_same(both: tuple[Series, Series], attempt: str) -> None:
    for one in both:
        again = pickle.loads(pickle.dumps(one.of_attempt(attempt)))  # noqa: S301
        assert again.path == one.path
        assert again.moments == one.moments
        np.testing.assert_array_equal(again.stack(), one.stack())


def test_a_table_of_the_records(both: tuple[Series, Series], prefix: Address, tmp_path: Path) -> None:
    frames = [capd.open(place).to_pandas() for place in (tmp_path / "run.zarr", prefix / "run.zarr")]
    assert frames[0].equals(frames[1])
    assert len(frames[0]) == 12
