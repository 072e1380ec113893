"""Rounds of an upload to a real S3 server: what readers find, and that nothing goes up twice."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import zarr
from zarr.storage import ObjectStore

from capd.errors import StoreBusy, StoreError
from capd.store.disk.layout import series_on_disk
from capd.store.objects.address import parse_address
from capd.store.objects.bucket import Bucket as ObjectBucket
from capd.store.segments.series_table import SeriesEntry
from capd.store.upload.checking import problem_of
from capd.store.upload.node_upload import NodeUpload
from capd.store.upload.plan import shard_key
from capd.store.upload.record_segments import MAX_SEGMENTS
from capd.store.upload.sending.halt import Halt
from capd.store.upload.sending.pace import Bandwidth
from capd.store.upload.sending.transfer import UploadTools
from tests.kit.objects.proxy import FaultProxy
from tests.kit.objects.published import (
    assert_published,
    assert_same_files,
    assert_zarr_reads_it,
    bodies_in,
    manifest_of,
    read_object,
    series_in,
)
from tests.kit.objects.service import Bucket
from tests.kit.store.cli import run_capd, session_row
from tests.kit.store.removing import small_run
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


def test_new_records_become_new_segments_and_a_complete_run_has_one(tmp_path: Path, place: Bucket) -> None:
    run_name, seen = "captures/run.zarr", []
    for turn in range(12):
        writer = Writer(tmp_path)
        writer.sequence = 100 * turn
        # Sizes that a merge by size alone would keep apart.
        for step in range(1 + 40 // (turn + 1)):
            writer.put(key("input"), "float32", np.full((8,), step, "<f4"), iteration=1000 * turn + step)
        writer.put(key("input", layer=turn), "float32", np.full((300, 300), turn, "<f4"), iteration=turn)
        save_live(writer, state="live" if turn < 11 else "ended")
        writer.close()
        with opened(writer.run, place) as upload:
            result = upload.round()
        manifest = assert_published(place, run_name, writer.run)
        assert manifest is not None
        assert result.is_complete == manifest.is_complete == (turn == 11)
        seen.append(len(manifest.records))
        rows = bodies_in(place, run_name)
        assert sum(map(len, rows.values())) == sum(one.rows for one in manifest.records)

    assert max(seen) > 1
    assert max(seen) <= MAX_SEGMENTS
    assert seen[-1] == 1
    assert_same_files(place, run_name, writer.run)


def save_live(writer: Writer, *, state: str) -> None:
    """The counters of the writer's session."""
    row = session_row(state=state, offered=writer.sequence, committed=writer.sequence, dropped={})
    writer.pipeline.save_session(writer.run_id, row)
    writer.flush()


def test_totals_of_a_part_count_only_what_is_sealed(tmp_path: Path, place: Bucket) -> None:
    writer = filled(tmp_path, records=3)
    writer.close()
    writer = Writer(tmp_path)
    writer.sequence = 100
    for step in range(3, 9):
        writer.put(key("input"), "float32", np.full((300, 300), step, "<f4"), iteration=step)
    writer.flush()
    with opened(writer.run, place) as upload:
        assert not upload.round().is_complete
        entries, _ = series_in(place, "captures/run.zarr")
        held = {one.row.header.key.tensor_name: one.row for one in entries}
        assert (held["input"].records, held["input"].raw_bytes) == (3, 3 * 300 * 300 * 4)
        assert held["input"].max_shape == (300, 300)
        writer.close()
        assert upload.round().is_complete
    manifest = assert_published(place, "captures/run.zarr", writer.run)
    assert manifest is not None
    assert manifest.raw_bytes == 9 * 300 * 300 * 4 + 3 * 8 * 4
    assert_same_files(place, "captures/run.zarr", writer.run)
    assert assert_zarr_reads_it(place, "captures/run.zarr", writer.run) == 2


def test_a_long_series_has_its_moments_array(tmp_path: Path, place: Bucket) -> None:
    writer = Writer(tmp_path)
    for step in range(10_500):
        writer.put(key("input"), "float32", np.full((4,), step, "<f4"), iteration=step)
    writer.close()
    with opened(writer.run, place) as upload:
        upload.round()
    writer = Writer(tmp_path)
    writer.sequence = 20_000
    writer.put(key("input"), "float32", np.full((4,), -1, "<f4"), iteration=20_000)
    writer.close()
    with opened(writer.run, place) as upload:
        upload.round()

    assert_published(place, "captures/run.zarr", writer.run)
    assert_same_files(place, "captures/run.zarr", writer.run)
    [entry], _ = series_in(place, "captures/run.zarr")
    names = [one.name for one in entry.documents]
    assert names == [
        *(f"moments/c/{at}/0" for at in range(3)),
        "moments/zarr.json",
        "zarr.json",
        "data/zarr.json",
    ]
    assert entry.row.records == 10_501
    group = zarr.open_group(ObjectStore(place.store("captures/run.zarr"), read_only=True), mode="r")
    assert group[f"{entry.row.header.path}/moments"].shape[0] == 10_501


def test_a_removed_series_leaves_the_manifest_and_a_tag_arrives(tmp_path: Path, place: Bucket) -> None:
    run = small_run(tmp_path, "run")
    with opened(run, place, "node0") as upload:
        upload.round()
        gone = min(series_on_disk(run))
        assert run_capd("rm", run, "--series", gone, "--yes").code == 0
        assert run_capd("tag", run, "kept").code == 0
        assert upload.round().published

    manifest = manifest_of(place, "captures/run.zarr", "node0")
    assert manifest is not None
    assert manifest.attributes["tags"] == ["kept"]
    assert gone not in bodies_in(place, "captures/run.zarr", "node0")
    assert b"kept" in read_object(place, "captures/run.zarr/zarr.json")


def test_the_loss_of_every_local_cache_uploads_no_shard_again(
    tmp_path: Path, place: Bucket, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = filled(tmp_path)
    writer.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", fault_proxy.endpoint)
    with opened(writer.run, place) as upload:
        upload.round()
    for file in writer.run.glob(".capd/node=n0/upload/*"):
        file.unlink()
    (writer.run / ".capd" / "node=n0" / "remote.json").unlink()
    fault_proxy.clear()
    assert run_capd("tag", writer.run, "again").code == 0
    with opened(writer.run, place) as upload:
        assert upload.round().published

    assert [one for one in fault_proxy.requests if one.method == "PUT" and "/data/" in one.path] == []
    assert_published(place, "captures/run.zarr", writer.run)


def test_superseded_segments_stay_for_ten_minutes(
    tmp_path: Path, place: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(tmp_path, "run")
    with opened(run, place, "node0") as upload:
        upload.round()
        old = set(place.keys("captures/run.zarr/.capd"))
        assert run_capd("rm", run, "--series", min(series_on_disk(run)), "--yes").code == 0
        upload.round()
        assert old <= set(place.keys("captures/run.zarr/.capd"))
        upload.round()
        assert old <= set(place.keys("captures/run.zarr/.capd"))
        now_s = time.time()
        monkeypatch.setattr(time, "time", lambda: now_s + 601)
        upload.round()

    manifest = manifest_of(place, "captures/run.zarr", "node0")
    assert manifest is not None
    named = {"manifest.json", manifest.series.name, *(one.name for one in manifest.records), "origin-node0"}
    assert {name.rpartition("/")[2] for name in place.keys("captures/run.zarr/.capd")} == named


class CountedBandwidth(Bandwidth):
    """A limit that remembers what passed it."""

    taken = largest = 0

    def take(self, nbytes: int, halt: Halt) -> None:
        """Count the bytes, too."""
        self.taken += nbytes
        self.largest = max(self.largest, nbytes)
        super().take(nbytes, halt)


def test_a_large_shard_goes_up_in_parts_within_bandwidth_and_memory(tmp_path: Path, place: Bucket) -> None:
    writer = Writer(tmp_path, codec="none")
    values = np.random.default_rng(0).standard_normal((3000, 3000)).astype("<f4")
    for step in range(2):
        writer.put(key("input"), "float32", values + step, iteration=step)
    writer.close()
    tools = UploadTools.make(rate=lambda: 200e6)
    tools.bandwidth = counted = CountedBandwidth(lambda: 200e6)
    with NodeUpload(writer.run, "n0", parse_address(place.url("captures")), tools) as upload:
        result = upload.round()

    shard = max(path.stat().st_size for path in writer.run.rglob("*") if path.is_file())
    assert shard > 72_000_000
    # The first manifest, segments and documents, too.
    assert counted.taken == result.nbytes > shard
    assert counted.largest <= 1 << 20
    assert_same_files(place, "captures/run.zarr", writer.run)
    [entry], _ = series_in(place, "captures/run.zarr")
    bucket = ObjectBucket(parse_address(place.url("captures/run.zarr")))
    assert problem_in(bucket, writer.run, entry) == ""


def problem_in(bucket: ObjectBucket, run: Path, entry: SeriesEntry) -> str:
    """What keeps the shards of a series on this disk."""
    for shard in entry.shards:
        key = shard_key(entry.row, shard.shard)
        if found := problem_of(bucket, key, run / key, (run / key).stat(), shard, entry.row.header):
            return found
    return ""


def test_what_is_not_as_it_was_uploaded_is_found_before_local_files_may_go(
    tmp_path: Path, place: Bucket
) -> None:
    writer = filled(tmp_path)
    writer.close()
    with opened(writer.run, place) as upload:
        upload.round()
    bucket = ObjectBucket(parse_address(place.url("captures/run.zarr")))
    entries, _ = series_in(place, "captures/run.zarr")
    [entry] = [one for one in entries if one.row.header.key.tensor_name == "input"]
    [shard] = entry.shards
    name = shard_key(entry.row, shard.shard)
    payload = read_object(place, f"captures/run.zarr/{name}")
    assert problem_in(bucket, writer.run, entry) == ""

    flipped = payload[:-9] + bytes([payload[-9] ^ 1]) + payload[-8:]
    for changed, crc32c, said in (
        (payload[:-1], shard.crc32c, "bytes, but"),
        (flipped, google_crc32c.value(flipped), "does not have the checksum"),
        (flipped, shard.crc32c, "the index of"),
    ):
        bucket.put(name, changed, crc32c=crc32c)
        assert said in problem_in(bucket, writer.run, entry)
    bucket.delete([name])
    assert "is missing" in problem_in(bucket, writer.run, entry)
    bucket.put(name, payload, crc32c=shard.crc32c)
    with (writer.run / name).open("ab") as file:
        file.write(b"x")
    assert "does not have the bytes that were uploaded" in problem_in(bucket, writer.run, entry)


def test_a_catalog_that_lacks_what_was_published_is_not_uploaded(tmp_path: Path, place: Bucket) -> None:
    writer = filled(tmp_path)
    writer.close()
    with opened(writer.run, place) as upload:
        upload.round()
        before = manifest_of(place, "captures/run.zarr")
        with closing(sqlite3.connect(writer.run / ".capd" / "node=n0" / "catalog.sqlite")) as database:
            database.execute("DELETE FROM series WHERE id = (SELECT MIN(id) FROM series)")
            database.commit()
        with pytest.raises(StoreError, match="lacks records of"):
            upload.round()

    assert manifest_of(place, "captures/run.zarr") == before


def test_a_directory_takes_an_upload_too(tmp_path: Path) -> None:
    writer = filled(tmp_path / "s")
    writer.close()
    to = parse_address(f"file://{tmp_path / 'bucket'}")
    for expected in (True, False):
        with NodeUpload(writer.run, "n0", to, UploadTools.make()) as upload:
            assert upload.round().published is expected

    for path in writer.run.rglob("*"):
        if path.is_file() and ".capd" not in path.parts:
            assert (
                tmp_path / "bucket" / "run.zarr" / path.relative_to(writer.run)
            ).read_bytes() == path.read_bytes()


def test_one_process_at_a_time_uploads_a_part(tmp_path: Path, place: Bucket) -> None:
    writer = filled(tmp_path, records=1)
    writer.close()
    with opened(writer.run, place), pytest.raises(StoreBusy, match="another process uploads"):
        opened(writer.run, place)
    opened(writer.run, place).close()


def test_verify_knows_the_files_of_an_upload(tmp_path: Path, place: Bucket) -> None:
    writer = filled(tmp_path, records=1)
    writer.close()
    with opened(writer.run, place) as upload:
        upload.round()

    found = run_capd("verify", writer.run)
    assert (found.code, found.err) == (0, ""), found.out
