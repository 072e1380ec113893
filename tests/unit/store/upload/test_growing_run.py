"""Rounds beside a writer that continues, seals and compacts shards: every manifest is true at every moment."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from capd.errors import StoreError
from capd.store.objects.address import parse_address
from capd.store.upload.local_files import OpenShard
from capd.store.upload.node_upload import NodeUpload
from capd.store.upload.sending.transfer import UploadTools
from tests.kit.daemon import wait_for
from tests.kit.objects.published import assert_published, assert_same_files, assert_zarr_reads_it
from tests.kit.objects.service import Bucket
from tests.kit.store.writing import Writer, key

RUN = "captures/run.zarr"


def write_some(root: Path, turn: int) -> Path:
    writer = Writer(root)
    writer.sequence = 1000 * turn
    for step in range(3):
        for layer in range(3):
            values = np.random.default_rng(100 * turn + step).standard_normal((300, 300)).astype("<f4")
            writer.put(key("input", layer=layer), "float32", values, iteration=10 * turn + step)
        writer.put(key("bias"), "float32", np.full((8,), step, "<f4"), iteration=10 * turn + step)
    writer.close()
    return writer.run


def test_every_manifest_is_true_while_the_run_grows(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    run, done, failures = write_some(tmp_path, 0), threading.Event(), []
    rounds = 0

    def follow() -> None:
        nonlocal rounds
        with NodeUpload(run, "n0", parse_address(bucket.url("captures")), UploadTools.make()) as upload:
            while True:
                is_last = done.is_set()
                try:
                    result = upload.round()
                except StoreError as error:
                    if not error.retry:
                        failures.append(error)
                        return
                    continue
                rounds += result.published
                if is_last:
                    return

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        for turn in range(1, 8):
            write_some(tmp_path, turn)
            if turn == 3:
                wait_for(lambda: rounds or not thread.is_alive(), "a first round")
            with contextlib.suppress(FileNotFoundError):
                # A newer manifest may supersede the segments of the one that is read here, but not of the one before.
                assert_published(bucket, RUN, run)
    finally:
        done.set()
        thread.join(60)

    assert failures == []
    assert rounds > 1
    manifest = assert_published(bucket, RUN, run)
    assert manifest is not None
    assert (manifest.is_complete, len(manifest.records)) == (True, 1)
    assert_same_files(bucket, RUN, run)
    assert assert_zarr_reads_it(bucket, RUN, run) == 4


def test_a_file_that_another_one_replaces_is_read_to_its_end(tmp_path: Path) -> None:
    old, new = os.urandom(3 << 20), os.urandom(4 << 20)
    place, other = tmp_path / "shard", tmp_path / "other"
    place.write_bytes(old)
    other.write_bytes(new)
    with OpenShard(place) as file:
        crc = file.crc32c()
        pieces = file.pieces()
        first = next(pieces)
        other.rename(place)
        assert b"".join([first, *pieces]) == old
        assert crc == google_crc32c.value(old)
    with OpenShard(place) as file:
        assert file.crc32c() == google_crc32c.value(new)


def test_a_link_is_not_followed_and_a_shorter_file_is_an_error(tmp_path: Path) -> None:
    place = tmp_path / "shard"
    place.write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to(place)
    with pytest.raises(OSError, match="link"):
        OpenShard(tmp_path / "link")
    with OpenShard(place) as file:
        os.truncate(place, 10)
        with pytest.raises(OSError, match="ends after 10 of 100 bytes"):
            file.crc32c()
