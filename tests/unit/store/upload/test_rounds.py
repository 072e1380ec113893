"""Rounds of an upload to a real S3 server: what readers find, and that nothing goes up twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from capd.store.objects.address import parse_address
from capd.store.upload.node_upload import NodeUpload
from capd.store.upload.sending.transfer import UploadTools
from tests.kit.objects.published import (
    assert_published,
    assert_same_files,
    assert_zarr_reads_it,
    bodies_in,
    manifest_of,
)
from tests.kit.objects.service import Bucket
from tests.kit.store.writing import Writer, key


@pytest.fixture
def place(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    return bucket


def opened(run: Path, bucket: Bucket, node: str = "n0") -> NodeUpload:
    return NodeUpload(run, node, parse_address(bucket.url("captures")), UploadTools.make())


def filled(root: Path, records: int = 5) -> Writer:
    writer = Writer(root)
    for step in range(records):
        writer.put(key("input"), "float32", np.full((300, 300), step, "<f4"), iteration=step)
        writer.put(key("weight"), "float32", np.full((8,), step, "<f4"), iteration=step)
    return writer


def test_a_sealed_run_is_uploaded_bit_for_bit_and_only_once(tmp_path: Path, place: Bucket) -> None:
    writer = filled(tmp_path)
    writer.close()

    with opened(writer.run, place) as upload:
        first = upload.round()
        second = upload.round()
    with opened(writer.run, place) as upload:
        third = upload.round()

    assert (first.published, first.is_complete, second.published, third.published) == (
        True,
        True,
        False,
        False,
    )
    manifest = assert_published(place, "captures/run.zarr", writer.run)
    assert manifest is not None
    assert (manifest.is_complete, len(manifest.records), manifest.generation) == (True, 1, 1)
    assert_same_files(place, "captures/run.zarr", writer.run)
    assert assert_zarr_reads_it(place, "captures/run.zarr", writer.run) == 2
    assert {path: len(rows) for path, rows in bodies_in(place, "captures/run.zarr").items()}.keys()
    assert manifest_of(place, "captures/run.zarr", "other") is None
