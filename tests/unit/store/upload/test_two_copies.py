"""What an upload makes of two copies that differ: a second store, a lost or rotten local file, a removed remote run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from capd.errors import ObjectStoreError
from capd.store.objects.address import parse_address
from capd.store.objects.bucket import Bucket as ObjectBucket
from capd.store.upload.node_upload import NodeUpload
from capd.store.upload.published_node import AnotherWriter
from capd.store.upload.sending.transfer import UploadTools
from tests.kit.objects.faults import ACCESS_DENIED, Faults, Request
from tests.kit.objects.proxy import FaultProxy
from tests.kit.objects.published import assert_same_files
from tests.kit.objects.service import Bucket
from tests.kit.store.cli import run_capd
from tests.kit.store.writing import Writer, key


@pytest.fixture
def place(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    return bucket


def opened(run: Path, bucket: Bucket) -> NodeUpload:
    return NodeUpload(run, "n0", parse_address(bucket.url("captures")), UploadTools.make())


def filled(root: Path, seed: int = 0) -> Path:
    """A sealed run of random records."""
    writer, values = Writer(root), np.random.default_rng(seed)
    for step in range(5):
        writer.put(key("input"), "float32", values.standard_normal((300, 300)).astype("<f4"), iteration=step)
    writer.close()
    return writer.run


def shard_of(run: Path) -> Path:
    return next(run.rglob("data/c/0/0/0"))


def assert_sound(bucket: Bucket) -> None:
    found = run_capd("verify", bucket.url("captures/run.zarr"))
    assert (found.code, "0 places damaged" in found.out or "sound" in found.out) == (0, True), found.out


def test_of_two_stores_that_begin_at_once_one_uploads_nothing(
    tmp_path: Path, place: Bucket, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = filled(tmp_path / "a", seed=1), filled(tmp_path / "b", seed=2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", fault_proxy.endpoint)
    begun: list[Request] = []

    def begin(request: Request) -> None:
        # The first one has looked at the empty place, and begins to write.
        if request.method == "PUT" and "/captures/run.zarr/" in request.path and not begun:
            begun.append(request)
            monkeypatch.setenv("AWS_ENDPOINT_URL", place.service.endpoint)
            with opened(second, place) as other:
                assert other.round().is_complete

    with opened(first, place) as upload:
        fault_proxy.on_request = begin
        with pytest.raises(AnotherWriter, match="another store began first"):
            upload.round()
        with pytest.raises(AnotherWriter):
            upload.round()

    assert begun
    assert_same_files(place, "captures/run.zarr", second)
    assert_sound(place)


def test_a_lost_shard_stays_in_the_object_store(tmp_path: Path, place: Bucket) -> None:
    run = filled(tmp_path)
    with opened(run, place) as upload:
        upload.round()
        shard_of(run).unlink()
        assert run_capd("tag", run, "again").code == 0
        assert upload.round().published

    assert_sound(place)


@pytest.mark.parametrize("harm", ["flip", "cut"])
def test_a_rotten_shard_does_not_take_the_place_of_its_object(
    tmp_path: Path, place: Bucket, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = filled(tmp_path)
    with opened(run, place) as upload:
        upload.round()
    file = shard_of(run)
    payload = bytearray(file.read_bytes())
    payload[5000] ^= 1
    # As a restored backup: the times of the file say nothing.
    file.unlink()
    file.write_bytes(payload if harm == "flip" else payload[:-9])
    with opened(run, place) as upload:
        for tag in ("a", "b"):
            assert run_capd("tag", run, tag).code == 0
            assert upload.round().published

    assert_sound(place)
    assert [str(file) in line for line in caplog.messages if "is damaged" in line] == [True]


def test_a_run_that_somebody_removed_there_goes_up_whole_again(tmp_path: Path, place: Bucket) -> None:
    run = filled(tmp_path)
    with opened(run, place) as upload:
        upload.round()
        bucket = ObjectBucket(parse_address(place.url("captures/run.zarr")))
        bucket.delete([head.key for head in bucket.listing()])
        assert run_capd("tag", run, "again").code == 0
        with pytest.raises(ObjectStoreError):
            upload.round()
        assert upload.round().is_complete

    assert_same_files(place, "captures/run.zarr", run)
    assert_sound(place)


def test_a_failed_round_leaves_no_segment_on_the_disk(
    tmp_path: Path, place: Bucket, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = filled(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", fault_proxy.endpoint)
    fault_proxy.faults = Faults(concerns=lambda one: "/data/" in one.path, every=1, answer=ACCESS_DENIED)
    with opened(run, place) as upload, pytest.raises(ObjectStoreError, match="access is denied"):
        upload.round()

    assert os.listdir(run / ".capd" / "node=n0" / "upload") == ["lock"]
