"""A run in an object store reads as the local one: series, records, statistics, elements."""

from __future__ import annotations

import threading
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import capd
from capd.store.objects.address import Address
from capd.store.read.store import Store
from tests.kit.objects.proxy import FaultProxy
from tests.kit.objects.service import Bucket
from tests.kit.objects.uploaded import filled, filled_in_rounds, publish


def content(store: Store) -> list[object]:
    """Everything that a reader sees of a run."""
    return [
        (
            series.path, series.dtype, series.shape, series.raw_bytes, series.stored_bytes, series.kept, series.node,
            [
                (
                    record.index, record.shape, record.iteration, record.time_ns, record.device, record.sealed,
                    asdict(record.stats), series.read(record.index).tobytes(),
                )
                for record in series.records
            ],
        )
        for series in store.everything()
    ]  # fmt: skip


def test_a_remote_run_has_the_same_content(tmp_path: Path, prefix: Address) -> None:
    run = filled(tmp_path)
    place = publish(run, prefix)
    local, remote = capd.open(run), capd.open(str(place))
    assert content(remote) == content(local)
    assert remote.run_id == local.run_id
    assert str(remote.path) == str(place)
    assert remote.totals() == local.totals()
    large = next(series for series in remote.series if series.key.tensor_name == "large")
    np.testing.assert_array_equal(large.numpy(4, np.s_[100:300:3, 7]), large.numpy(4)[100:300:3, 7])
    np.testing.assert_array_equal(
        large.stack(slice(1, 8, 2)), np.stack([large.values(i) for i in (1, 3, 5, 7)])
    )


def test_records_in_several_segments_are_found(tmp_path: Path, prefix: Address) -> None:
    run = filled_in_rounds(tmp_path, prefix)
    remote = capd.open(prefix / run.name)
    assert [len(node.manifest.records) for node in remote._source.opened] == [3]
    assert content(remote) == content(capd.open(run))


def test_two_nodes_under_one_prefix_read_as_one_run(tmp_path: Path, prefix: Address) -> None:
    run = filled(tmp_path, node="n0", seed=1)
    assert filled(tmp_path, node="n1", seed=2) == run
    place = publish(run, prefix)
    remote = capd.open(place)
    assert content(remote) == content(capd.open(run))
    assert [node.name for node in remote.nodes] == ["n0", "n1"]


def test_the_manifests_of_several_nodes_are_asked_for_at_once(
    tmp_path: Path, bucket: Bucket, prefix: Address, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in ("n0", "n1"):
        run = filled(tmp_path, node=node, count=1)
    place = publish(run, prefix)
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.through(fault_proxy).service.endpoint)
    both = threading.Barrier(2)
    fault_proxy.on_request = lambda one: one.path.endswith("manifest.json") and both.wait(20)
    assert len(capd.open(place).nodes) == 2
    assert not both.broken


@pytest.mark.parametrize("name", ["large", "small", "stats"])
def test_one_record_costs_few_requests(tmp_path: Path, prefix: Address, name: str) -> None:
    place = publish(filled(tmp_path), prefix)
    store = capd.open(place)
    bucket = store._source.bucket
    assert bucket.requests == 2  # the list and the manifest
    series = next(one for one in store.series if one.key.tensor_name == name)
    assert bucket.requests == 3
    assert series.records[3].stats.count
    assert bucket.requests == 4
    series.read(3)
    assert bucket.requests <= 6
    before = bucket.requests
    series.read(3)
    assert bucket.requests == before
    store.refresh()
    assert bucket.requests == before + 1
