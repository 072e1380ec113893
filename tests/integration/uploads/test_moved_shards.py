"""A daemon with `delete_local`: shards leave its disk when they are uploaded, and nothing else does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from capd.store.objects.address import parse_address
from capd.store.scan.survey import moved_shards, shard_files
from capd.store.upload.node_upload import NodeUpload
from capd.store.upload.sending.transfer import UploadTools
from capd.store.verify.run import verify_run
from tests.kit.daemon import DaemonProcess, wait_for
from tests.kit.objects.service import Bucket
from tests.kit.objects.uploading import PREFIX, serve, upload_of, uploaded_all
from tests.kit.store.moving import LARGE, SMALL, put_steps, written
from tests.kit.store.reading import assert_capd_reads
from tests.kit.store.removing import age
from tests.kit.store.writing import Writer

AT_ONCE = {"CAPD_UPLOAD_DELETE_LOCAL": "after:0s"}


def moved_count(run: Path) -> int:
    """The number of stubs in a run."""
    return sum(len(moved_shards(run, path)) for path in (LARGE, SMALL))


def test_a_daemon_moves_what_it_uploaded(tmp_path: Path, made: list[DaemonProcess], bucket: Bucket) -> None:
    """Its log and its figures say so; the run is read whole, and continued by the next daemon."""
    writer = written(tmp_path / "s", node="n")
    made.append(serve(tmp_path / "s", tmp_path / "c.sock", bucket, environ=AT_ONCE))
    wait_for(lambda: moved_count(writer.run) == 8, "all full shards are moved", 60)
    wait_for(lambda: upload_of(made[0])["moved_shards"] == 8, "they are counted")
    found = upload_of(made[0])
    assert (found["state"], found["kept_shards"]) == ("ok", 0)
    assert found["moved_bytes"] > 4 << 20
    assert made[0].stop() == 0
    assert f"[upload] moved 8 shards of {writer.run}" in made[0].text()
    assert_capd_reads(writer.run, writer.held)
    assert verify_run(writer.run).ok
    again = Writer(tmp_path / "s", shard_nbytes=1 << 20, node="n")
    again.held, again.sequence = writer.held, writer.sequence
    put_steps(again, 9, 12)
    again.close()
    assert_capd_reads(writer.run, again.held)


def test_without_delete_local_everything_stays(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket
) -> None:
    """never is the default."""
    writer = written(tmp_path / "s", node="n")
    made.append(serve(tmp_path / "s", tmp_path / "c.sock", bucket))
    uploaded_all(bucket)
    assert made[0].stop() == 0
    assert moved_count(writer.run) == 0
    assert upload_of_text(made[0]) == 0


def upload_of_text(daemon: DaemonProcess) -> int:
    """How often the log tells of moved shards."""
    return daemon.text().count("[upload] moved")


@pytest.mark.parametrize(
    "point", ["move.after_stub", "move.after_rename", pytest.param("move.after_sync", marks=pytest.mark.slow)]
)
def test_the_next_daemon_completes_what_a_kill_interrupted(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket, point: str
) -> None:
    """Killed in the middle of its third move: nothing is lost, and the rest is moved."""
    writer = written(tmp_path / "s", node="n")
    failing = {**AT_ONCE, "CAPD_FAILPOINTS": f"{point}=kill@3"}
    made.append(serve(tmp_path / "s", tmp_path / "c.sock", bucket, environ=failing))
    assert made[0].process.wait(60) == -9
    assert_capd_reads(writer.run, writer.held)
    made.append(serve(tmp_path / "s", tmp_path / "c.sock", bucket, environ=AT_ONCE))
    wait_for(lambda: moved_count(writer.run) == 8, "the rest is moved", 60)
    assert made[1].stop() == 0
    assert_capd_reads(writer.run, writer.held)
    assert verify_run(writer.run).ok


def test_a_shard_whose_object_was_changed_stays_with_one_line(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket
) -> None:
    """Somebody truncated an object after its upload: its shard stays, counted, and the others go."""
    writer = written(tmp_path / "s", node="n")
    with NodeUpload(writer.run, "n", parse_address(bucket.url(PREFIX)), UploadTools.make()) as upload:
        upload.round()
    key = f"{PREFIX}/run.zarr/{shard_files(writer.run / LARGE)[1].relative_to(writer.run)}"
    bucket.store().put(key, b"short")
    made.append(serve(tmp_path / "s", tmp_path / "c.sock", bucket, environ=AT_ONCE))
    wait_for(lambda: moved_count(writer.run) == 7, "the others are moved", 60)
    wait_for(lambda: upload_of(made[0])["kept_shards"] == 1, "it is counted")
    assert made[0].stop() == 0
    assert made[0].text().count("stays on this disk") == 1
    assert sorted(moved_shards(writer.run, LARGE)) == [0, 2, 3]
    assert verify_run(writer.run).ok


def test_retention_waits_for_the_upload(tmp_path: Path, made: list[DaemonProcess], bucket: Bucket) -> None:
    """With uploads, [retention] removes only runs that are wholly in the object store."""
    store = tmp_path / "s"
    for number, name in enumerate(("uploaded", "other", "newest")):
        written(store, 1, node="n", run_id=name)
        age(store / f"{name}.zarr", 30 - 10 * number)
    with NodeUpload(
        store / "uploaded.zarr", "n", parse_address(bucket.url(PREFIX)), UploadTools.make()
    ) as upload:
        assert upload.round().is_complete
    config = tmp_path / "capd.toml"
    config.write_text(
        f'[upload]\nto = "{bucket.url(PREFIX)}"\nruns = "uploaded"\n[retention]\nkeep_last = 1\n'
    )
    environ = {**os.environ, "CAPD_CONFIG": str(config)}
    made.append(DaemonProcess(store, tmp_path / "c.sock", "--config", str(config), env=environ))
    wait_for(lambda: "[retention] moved run uploaded" in made[0].text(), "the uploaded run is removed", 60)
    assert made[0].stop() == 0
    assert sorted(path.stem for path in store.glob("*.zarr")) == ["newest", "other"]
