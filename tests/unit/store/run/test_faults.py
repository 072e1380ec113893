"""Single faults at chosen steps: what was acknowledged stays, what was refused is absent, writing goes on."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import capd
from capd.errors import DamagedRecord, StoreError
from capd.server.pipeline.jobs import RecordJob
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.disk import layout
from capd.store.recover.state import Recovery
from capd.store.run.run_store import RunStore
from capd.store.shards import small_log
from capd.store.shards import writer as shard_writer
from capd.store.verify.run import verify_run
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import Define, Descriptor
from tests.kit.store.damaging import image
from tests.kit.store.reading import assert_capd_reads, assert_zarr_readers_read
from tests.kit.store.writing import CLIENT, Writer, key

RNG = np.random.default_rng(5)
LARGE, SMALL = key("large"), key("small")


def large() -> np.ndarray:
    return RNG.standard_normal((256, 256)).astype("f4")


def little() -> np.ndarray:
    return RNG.standard_normal((10, 8)).astype("f4")


def failing(real: Callable[..., Any], *numbers: int, error: int = 28) -> Callable[..., Any]:
    """`real`, but the calls with these numbers (from 0) fail."""
    calls = iter(range(1_000_000))

    def call(fd: int, *arguments: Any, **options: Any) -> Any:
        if next(calls) in numbers:
            raise OSError(error, os.strerror(error))
        return real(fd, *arguments, **options)

    return call


def drop_refused(writer: Writer) -> None:
    """Take what was refused out of the expectation (every put here has its own iteration = sequence)."""
    refused = {sequence for sequence, _, _ in writer.outcomes.refusals}
    for records in writer.held.values():
        records[:] = [(moment, bits) for moment, bits in records if moment.iteration not in refused]


def put(writer: Writer, identity: Any, bits: np.ndarray) -> int:
    return writer.put(identity, "float32", bits, iteration=writer.sequence + 1)


def test_a_failed_first_write_to_a_new_shard_leaves_the_sealed_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path, shard_nbytes=4 * 256 * 256 * 4)
    for _ in range(4):
        put(writer, LARGE, large())
    writer.flush()
    writer.pipeline.post("run", lambda store: store.maintain()).result(timeout=30)  # the full shard is sealed
    monkeypatch.setattr(shard_writer, "pwrite_all", failing(shard_writer.pwrite_all, 0))
    put(writer, LARGE, large())
    writer.flush()
    monkeypatch.undo()
    writer.pipeline.seal("run").result(timeout=30)
    for _ in range(3):
        put(writer, LARGE, large())
    writer.close()

    assert len(writer.outcomes.refusals) == 1
    drop_refused(writer)
    assert_capd_reads(writer.run, writer.held)
    assert_zarr_readers_read(writer.run, writer.held)


@pytest.mark.parametrize("function", ["new_file", "pwrite_all"])
def test_a_full_disk_in_the_small_log_costs_that_record_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    writer = Writer(tmp_path / "a", log_nbytes=1)  # each write begins a file
    for _ in range(5):
        put(writer, SMALL, little())
    writer.flush()
    # records written together are tried one by one once the disk refuses: the second failure meets one of them
    monkeypatch.setattr(small_log, function, failing(getattr(small_log, function), 0, 1))
    for _ in range(12):
        put(writer, SMALL, little())
    writer.flush()
    monkeypatch.undo()
    root = image(writer, tmp_path / "b").parent
    writer.close()

    assert 1 <= len(writer.outcomes.refusals) <= 2  # two where the first failure met a record alone
    drop_refused(writer)
    again = Writer(root)
    again.close()
    assert_capd_reads(again.run, writer.held)
    assert_zarr_readers_read(again.run, writer.held)
    assert_zarr_readers_read(writer.run, writer.held)


def test_a_disk_that_takes_no_new_name_is_not_asked_for_ten_thousand_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path)
    asked: list[Path] = []

    def rename(source: Path, target: Path) -> None:
        asked.append(target)
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(layout, "rename", rename)
    put(writer, SMALL, little())
    put(writer, LARGE, large())
    writer.flush()
    monkeypatch.undo()
    put(writer, SMALL, little())
    put(writer, LARGE, large())
    writer.close()

    assert [reason for _, reason, _ in writer.outcomes.refusals] == [DropReason.DISK_FULL] * 2
    assert len(asked) == 2
    drop_refused(writer)
    assert [series.path for series in capd.open(writer.run).series if "~" in series.path] == []
    assert_capd_reads(writer.run, writer.held)


def durable_writer(root: Path, identity: Any) -> Writer:
    writer = Writer(root, durability="durable")
    for _ in range(3):
        put(writer, identity, large() if identity is LARGE else little())
    writer.flush()
    return writer


@pytest.mark.parametrize("identity", [LARGE, SMALL])
def test_after_a_failed_sync_the_records_stand_in_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identity: Any
) -> None:
    writer = durable_writer(tmp_path / "a", identity)
    bits = large if identity is LARGE else little
    [file] = [p for p in (writer.run / ".capd/node=n0/spool").iterdir() if p.suffix in (".partial", ".log")]
    inode = file.stat().st_ino
    held = file.open("rb")  # keeps the number from being used again
    monkeypatch.setattr(os, "fdatasync", failing(os.fdatasync, 0, error=5))
    put(writer, identity, bits())
    writer.flush()
    monkeypatch.undo()
    assert file.stat().st_ino != inode
    held.close()
    for _ in range(3):
        put(writer, identity, bits())
    writer.flush()
    root = image(writer, tmp_path / "b").parent
    writer.close()

    assert not writer.outcomes.refusals
    again = Writer(root)
    assert again.pipeline.committed("run", CLIENT) == [(1, 7)]
    again.close()
    for run in (writer.run, again.run):
        assert_capd_reads(run, writer.held)
        assert_zarr_readers_read(run, writer.held)


@pytest.mark.parametrize("identity", [LARGE, SMALL])
def test_where_no_sync_succeeds_nothing_more_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identity: Any
) -> None:
    writer = durable_writer(tmp_path / "a", identity)
    bits = large if identity is LARGE else little
    monkeypatch.setattr(os, "fdatasync", failing(os.fdatasync, *range(1000), error=5))
    monkeypatch.setattr(os, "fsync", failing(os.fsync, *range(1000), error=5))
    put(writer, identity, bits())
    writer.flush()
    monkeypatch.undo()
    put(writer, identity, bits())
    writer.flush()
    root = image(writer, tmp_path / "b").parent
    assert not writer.pipeline.close(10)

    assert [(s, r.value) for s, r, _ in writer.outcomes.refusals] == [(4, "store_error"), (5, "store_error")]
    assert "the disk lost unsynced data" in writer.outcomes.refusals[1][2]
    drop_refused(writer)
    again = Writer(root)
    assert again.pipeline.committed("run", CLIENT) == [(1, 3)]
    again.close()
    assert_capd_reads(again.run, writer.held)
    assert_zarr_readers_read(again.run, writer.held)


@pytest.mark.parametrize("identity", [LARGE, SMALL])
def test_a_failed_sync_at_sealing_is_never_tried_again_on_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identity: Any
) -> None:
    writer = Writer(tmp_path)
    for _ in range(3):
        put(writer, identity, large() if identity is LARGE else little())
    writer.flush()
    synced: list[int] = []
    held: list[int] = []  # keeps the number of the failed file from being used again
    real = os.fsync

    def fsync(fd: int) -> None:
        if not os.readlink(f"/proc/self/fd/{fd}").endswith(".partial"):
            return real(fd)
        synced.append(os.fstat(fd).st_ino)
        if not held:
            held.append(os.dup(fd))
            raise OSError(5, os.strerror(5))
        return real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        writer.pipeline.seal("run").result(timeout=30)
    writer.close()
    os.close(held[0])

    assert synced.count(synced[0]) == 1
    assert_capd_reads(writer.run, writer.held)
    assert_zarr_readers_read(writer.run, writer.held)


def test_a_shard_file_that_could_not_be_created_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import capd.store.disk.files as files

    writer = Writer(tmp_path)
    monkeypatch.setattr(files, "pwrite_all", failing(files.pwrite_all, 0))
    monkeypatch.setattr(shard_writer, "new_file", lambda *a, **k: files.new_file(*a, **k))
    put(writer, LARGE, large())
    writer.flush()
    monkeypatch.undo()
    put(writer, LARGE, large())
    writer.close()

    assert len(writer.outcomes.refusals) >= 1
    drop_refused(writer)
    assert_zarr_readers_read(writer.run, writer.held)


def test_a_seal_that_failed_behind_the_rename_is_finished_by_the_next_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path)
    put(writer, LARGE, large())
    writer.flush()
    monkeypatch.setattr("capd.store.run.run_store.publish", failing(lambda *_: None, 0, error=5))
    with pytest.raises(OSError, match="Input/output error"):
        writer.pipeline.seal("run").result(timeout=30)
    monkeypatch.undo()
    for _ in range(3):
        put(writer, LARGE, large())
    writer.close()

    assert not writer.outcomes.refusals
    assert_zarr_readers_read(writer.run, writer.held)


def test_one_damaged_small_record_does_not_keep_the_others_from_sealing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path)
    others = [key("other"), LARGE]
    damaged = put(writer, SMALL, little())
    put(writer, SMALL, little())
    for identity in others:
        put(writer, identity, little() if identity is not LARGE else large())
    writer.flush()
    [log] = (writer.run / ".capd" / "node=n0" / "spool").glob("small-*.log")
    content = bytearray(log.read_bytes())
    raw = writer.held[(SMALL, "float32")][0][1].tobytes()
    content[content.index(raw)] ^= 1
    log.write_bytes(content)
    monkeypatch.setattr("capd.store.run.small_records._Fresh.take", lambda *_: None)  # as behind a restart

    with pytest.raises(StoreError, match="small records"):
        writer.pipeline.seal("run").result(timeout=30)
    assert not writer.pipeline.close(30)

    store = capd.open(writer.run)
    [series] = [s for s in store.series if s.key == SMALL]
    assert series.records[0].iteration == damaged
    with pytest.raises(DamagedRecord):
        series.numpy(0)
    assert np.array_equal(series.numpy(1), writer.held[(SMALL, "float32")][1][1])
    assert all(s.zarr().shape[0] == 1 for s in store.series if s.key in others)


def test_an_interrupted_rebuild_of_the_catalog_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path, shard_nbytes=2 * 256 * 256 * 4)
    for _ in range(25):  # more than ten shards
        put(writer, LARGE, large())
        put(writer, SMALL, little())
    writer.close()
    before = capd.open(writer.run).totals()
    node = writer.run / ".capd" / "node=n0"
    for path in node.glob(f"{CATALOG_NAME}*"):
        path.unlink()
    monkeypatch.setattr("capd.store.recover.open_node.replay_logs", failing(lambda _, **__: None, 0))
    with pytest.raises(StoreError):
        Writer(tmp_path)
    monkeypatch.undo()

    again = Writer(tmp_path, shard_nbytes=2 * 256 * 256 * 4)
    assert again.pipeline.committed("run", CLIENT) == [(1, 50)]
    again.sequence, again.held = writer.sequence, writer.held
    put(again, LARGE, large())
    again.close()

    after = capd.open(writer.run).totals()
    assert (after.records, after.raw_bytes) == (before.records + 1, before.raw_bytes + 256 * 256 * 4)
    assert_capd_reads(writer.run, writer.held)
    assert_zarr_readers_read(writer.run, writer.held)


def test_a_recovery_killed_behind_a_loss_still_knows_what_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog's rows of lost records are forgotten; the next start may not take its totals for the truth."""
    writer = Writer(tmp_path / "before")
    for _ in range(5):
        put(writer, SMALL, little())
    writer.flush()
    writer.pipeline.post("run", RunStore.flush_catalog).result(timeout=30)
    run = image(writer, tmp_path / "after")
    writer.close()
    [log] = (run / ".capd" / "node=n0" / "spool").glob("small-*.log")
    content = bytearray(log.read_bytes())
    content[content.index(writer.held[(SMALL, "float32")][0][1].tobytes())] ^= 1
    log.write_bytes(content)
    monkeypatch.setattr("capd.store.recover.open_node._reconcile", failing(lambda _: None, 0))
    with pytest.raises(StoreError):
        Writer(tmp_path / "after")
    monkeypatch.undo()

    again = Writer(tmp_path / "after")

    assert again.pipeline.committed("run", CLIENT) == [(2, 5)]
    again.held = {(SMALL, "float32"): writer.held[(SMALL, "float32")][1:]}
    again.close()
    assert_capd_reads(run, again.held)
    assert_zarr_readers_read(run, again.held)


def test_a_series_that_lost_all_its_records_is_still_an_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path / "before")
    put(writer, LARGE, large())  # its shard is begun
    writer.flush()
    writer.pipeline.post("run", RunStore.flush_catalog).result(timeout=30)
    run = image(writer, tmp_path / "after")
    writer.close()
    [partial] = (run / ".capd" / "node=n0" / "spool").glob("*.partial")
    partial.unlink()
    monkeypatch.setattr(Recovery, "acknowledge_what_is_there", failing(lambda _: None, 0))
    with pytest.raises(StoreError):
        Writer(tmp_path / "after")
    monkeypatch.undo()

    again = Writer(tmp_path / "after")

    [array] = run.glob("bf16/rank0/*/*/*/data")
    assert zarr.open_array(array, mode="r").shape == (0, 256, 256)
    put(again, LARGE, large())
    again.close()
    assert verify_run(run).ok
    assert_zarr_readers_read(run, again.held)


def test_a_locked_catalog_is_not_taken_for_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path)
    put(writer, LARGE, large())
    writer.close()
    node = writer.run / ".capd" / "node=n0"
    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: real(*a, **{**k, "timeout": 0.05}))
    reader = real(node / CATALOG_NAME, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM series").fetchall()

    with pytest.raises(StoreError, match="locked") as caught:
        Writer(tmp_path)
    reader.close()

    assert caught.value.retry
    assert not (node / "quarantine").exists()
    Writer(tmp_path).close()
    assert_capd_reads(writer.run, writer.held)


def test_a_catalog_damaged_inside_is_rebuilt(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for _ in range(300):
        put(writer, SMALL, little())
    writer.close()
    catalog = writer.run / ".capd" / "node=n0" / CATALOG_NAME
    content = bytearray(catalog.read_bytes())
    content[4096 * 2 :] = b"\xab" * (len(content) - 4096 * 2)
    catalog.write_bytes(content)

    Writer(tmp_path).close()

    assert_capd_reads(writer.run, writer.held)
    assert (writer.run / ".capd" / "node=n0" / "quarantine" / CATALOG_NAME).exists()


def test_records_that_the_files_lost_are_forgotten_and_numbers_stay_dense(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    for _ in range(4):
        put(writer, LARGE, large())
        put(writer, SMALL, little())
    writer.flush()
    writer.pipeline.post("run", lambda store: store.flush_catalog()).result(timeout=30)
    root = image(writer, tmp_path / "b").parent
    writer.close()
    spool = root / "run.zarr" / ".capd" / "node=n0" / "spool"
    [partial] = spool.glob("*.partial")
    os.truncate(partial, partial.stat().st_size - 10)
    [log] = spool.glob("*.log")
    os.truncate(log, log.stat().st_size - 10)

    again = Writer(root)
    again.sequence = 8
    again.held = {identity: records[:3] for identity, records in writer.held.items()}
    put(again, LARGE, large())
    put(again, SMALL, little())
    again.close()

    assert_capd_reads(again.run, again.held)
    assert_zarr_readers_read(again.run, again.held)


def test_a_shape_that_cannot_be_encoded_is_refused_alone(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    sequence, shape = 1000, (0, 1 << 31, 1 << 31)
    define, descriptor = (
        Define(id=0, key=LARGE, dtype="float32"),
        Descriptor(sequence, 0, 0, 0, shape, Moment()),
    )
    writer.pipeline.submit(
        RecordJob("run", CLIENT, sequence, define, descriptor, memoryview(b""), writer.outcomes)
    )
    put(writer, LARGE, large())
    writer.close()

    assert [(s, r.value) for s, r, _ in writer.outcomes.refusals] == [(sequence, "store_error")]
    assert_capd_reads(writer.run, writer.held)


@pytest.mark.parametrize(
    "step",
    [
        "capd.store.shards.writer.ShardWriter.write_index",
        "capd.store.shards.seal.make_directory",
        "capd.store.run.run_store.publish",
        "capd.store.disk.layout.Layout.publish",
    ],
)
def test_a_kill_while_a_full_shard_is_sealed_loses_nothing(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path / "a", shard_nbytes=3 * 256 * 256 * 4)

    def stop(*_: object, **__: object) -> None:
        raise OSError(5, "stopped here")

    monkeypatch.setattr(step, stop)
    for _ in range(3):
        put(writer, LARGE, large())
    writer.flush()
    root = image(writer, tmp_path / "b").parent
    assert_capd_reads(root / "run.zarr", writer.held)
    monkeypatch.undo()

    again = Writer(root, shard_nbytes=3 * 256 * 256 * 4)
    assert again.pipeline.run_stats("run").records == 3
    assert again.pipeline.committed("run", CLIENT) == [(1, 3)]
    again.sequence, again.held = 3, {k: list(v) for k, v in writer.held.items()}
    put(again, LARGE, large())
    again.close()
    writer.close()

    assert_capd_reads(again.run, again.held)
    assert_zarr_readers_read(again.run, again.held)
    assert_zarr_readers_read(writer.run, writer.held)
