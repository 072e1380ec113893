"""Uploads of runs whose shards were moved, against a real server: what is there stays, and what comes joins it."""

from __future__ import annotations

from pathlib import Path

import pytest

import capd
from capd.errors import StoreError
from capd.store.disk.layout import node_directory
from capd.store.documents.remote_state import REMOTE_STATE_NAME
from capd.store.objects.address import parse_address
from capd.store.objects.bucket import Bucket as Objects
from capd.store.scan.survey import moved_shards, shard_files
from capd.store.upload.moving import ShardMover, UploadedPart
from capd.store.upload.node_upload import NodeUpload
from capd.store.upload.sending.transfer import UploadTools
from capd.store.verify.run import verify_run
from tests.kit.objects.service import Bucket
from tests.kit.store.moving import AT_ONCE, LARGE, SMALL, put_steps, written
from tests.kit.store.reading import assert_capd_reads
from tests.kit.store.writing import Writer


@pytest.fixture
def place(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket that the environment leads to."""
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    return bucket


def upload_and_move(run: Path, place: Bucket, prefix: str = "captures") -> ShardMover:
    """One round of an upload, then all shards that may go."""
    mover = ShardMover(AT_ONCE)
    with NodeUpload(run, "n0", parse_address(place.url(prefix)), UploadTools.make()) as upload:
        upload.round()
        part = upload.uploaded()
        assert part is not None
        mover.move([part])
    return mover


def sizes(place: Bucket) -> dict[str, int]:
    """The shard objects and their sizes."""
    found = [one for page in place.store().list() for one in page]
    return {one["path"]: one["size"] for one in found if "/data/c/" in one["path"]}


def test_a_run_is_moved_continued_and_moved_again(tmp_path: Path, place: Bucket) -> None:
    """Each step leaves a run that is read whole, here and at its address, and every object stays as it was."""
    writer = written(tmp_path)
    mover = upload_and_move(writer.run, place)
    assert mover.shards == 8
    assert not mover.refused
    before = sizes(place)
    assert_capd_reads(writer.run, writer.held)
    again = Writer(tmp_path, shard_nbytes=1 << 20)
    again.held, again.sequence = writer.held, writer.sequence
    put_steps(again, 9, 13)
    again.close()
    mover = upload_and_move(writer.run, place)
    assert mover.shards
    after = sizes(place)
    moved = {
        f"captures/run.zarr/{one.key}"
        for path in (LARGE, SMALL)
        for one in moved_shards(writer.run, path).values()
    }
    assert {key: after[key] for key in before if key in moved and before[key] == after[key]}
    assert all(after[key] > 8192 for key in after)
    assert_capd_reads(writer.run, again.held)
    assert verify_run(writer.run).ok
    there = capd.open(place.url("captures/run.zarr"))
    assert {series.path: len(series) for series in there.series} == {LARGE: 13, SMALL: 104}
    for series in there.series:
        local = capd.open(writer.run)[series.path]
        assert all(series.numpy(n).tobytes() == local.numpy(n).tobytes() for n in range(0, len(series), 7))


def test_a_store_that_lost_its_state_does_not_upload_stubs(tmp_path: Path, place: Bucket) -> None:
    """Without remote.json and caches, the upload finds by its stubs what is there."""
    writer = written(tmp_path)
    upload_and_move(writer.run, place)
    before = sizes(place)
    directory = node_directory(writer.run, "n0")
    (directory / REMOTE_STATE_NAME).unlink()
    for left in (directory / "upload").iterdir():
        left.unlink()
    upload_and_move(writer.run, place)
    assert sizes(place) == before
    assert_capd_reads(writer.run, writer.held)


def test_a_run_whose_shards_are_elsewhere_goes_nowhere_else(tmp_path: Path, place: Bucket) -> None:
    """Another address is refused in one line before anything is changed, also when the state is lost."""
    writer = written(tmp_path)
    upload_and_move(writer.run, place)
    state = node_directory(writer.run, "n0") / REMOTE_STATE_NAME
    before = state.read_bytes()
    with pytest.raises(StoreError, match=r"are only in s3://.*/captures/run\.zarr; upload it there"):
        upload_and_move(writer.run, place, "elsewhere")
    assert state.read_bytes() == before
    state.unlink()
    with pytest.raises(StoreError, match="are only in s3://"):
        upload_and_move(writer.run, place, "elsewhere")


def test_an_object_without_its_checksum_is_not_trusted(tmp_path: Path, place: Bucket, caplog) -> None:
    """Somebody wrote an object again without the attribute: its shard stays here."""
    writer = written(tmp_path)
    with NodeUpload(writer.run, "n0", parse_address(place.url("captures")), UploadTools.make()) as upload:
        upload.round()
        file = shard_files(writer.run / LARGE)[0]
        key = f"captures/run.zarr/{file.relative_to(writer.run)}"
        place.store().put(key, file.read_bytes())
        mover = ShardMover(AT_ONCE)
        part = upload.uploaded()
        assert part is not None
        mover.move([part])
    assert mover.refused == 1
    assert "has no checksum" in caplog.text
    assert sorted(moved_shards(writer.run, LARGE)) == [1, 2, 3]


def test_a_store_that_does_not_answer_moves_nothing(tmp_path: Path, place: Bucket, monkeypatch) -> None:
    """The failure is raised to whoever retries; every shard is still here."""
    writer = written(tmp_path)
    with NodeUpload(writer.run, "n0", parse_address(place.url("captures")), UploadTools.make()) as upload:
        upload.round()
        part = upload.uploaded()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert part is not None
    gone = UploadedPart(part.run, part.node, Objects(part.bucket.address), part.entries)
    with pytest.raises(StoreError):
        ShardMover(AT_ONCE).move([gone])
    assert not moved_shards(writer.run, LARGE)
