"""Durable stores: an acknowledgement comes behind a sync of what it acknowledges, and one sync serves many."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capd.store.disk import files, layout, open_files
from capd.store.shards import small_log
from capd.store.shards import writer as shard_writer
from capd.store.verify.run import verify_run
from tests.kit.store.reading import assert_capd_reads, assert_zarr_readers_read
from tests.kit.store.writing import Outcomes, Writer, key

RNG = np.random.default_rng(9)


class Ordered(Outcomes):
    """Remembers writes, syncs and acknowledgements in the order in which they happen."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def committed(self, sequence: int) -> None:
        self.events.append("ack")
        super().committed(sequence)


def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Writer, Ordered]:
    outcomes = Ordered()

    def noting(module: Any, function: str, event: str) -> None:
        real = getattr(module, function)

        def call(*arguments: Any) -> Any:
            result = real(*arguments)
            outcomes.events.append(event)
            return result

        monkeypatch.setattr(module, function, call)

    noting(shard_writer, "pwrite_all", "write")
    noting(small_log, "pwrite_all", "write")
    noting(open_files, "sync_data", "sync")
    noting(files, "_sync_file_system", "sync")
    writer = Writer(tmp_path, durability="durable", **options)
    writer.outcomes = outcomes
    return writer, outcomes


def put_many(writer: Writer, count: int, series: int) -> None:
    for number in range(count):
        writer.put(key(f"s{number % series}"), "float32", RNG.standard_normal((4, 8)).astype("f4"))
        if number % 10 == 0:
            writer.put(key(f"l{number % series}"), "float32", RNG.standard_normal((300, 256)).astype("f4"))


@pytest.mark.parametrize("series", [3, 60])  # few dirty files are synced one by one, many with one syncfs
def test_every_acknowledgement_comes_behind_a_sync_of_its_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, series: int
) -> None:
    writer, outcomes = watched(tmp_path, monkeypatch)
    put_many(writer, 300, series)
    writer.flush()

    unsynced = 0
    for event in outcomes.events:
        if event == "write":
            unsynced += 1
        elif event == "sync":
            unsynced = 0
        else:
            assert not unsynced
    monkeypatch.undo()
    writer.close()
    assert not outcomes.refusals
    assert_capd_reads(writer.run, writer.held)
    assert_zarr_readers_read(writer.run, writer.held)


def test_records_that_come_together_share_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, outcomes = watched(tmp_path, monkeypatch)
    gate = threading.Event()
    writer.pipeline.post("run", lambda _: gate.wait(30))  # all of them gather while the append thread is busy
    for _ in range(200):
        writer.put(key("x"), "float32", RNG.standard_normal((4, 8)).astype("f4"))
    gate.set()
    writer.flush()

    assert outcomes.events.count("ack") == 200
    assert outcomes.events.count("sync") <= 10
    writer.close()


def test_a_file_is_synced_before_its_descriptor_makes_room_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, outcomes = watched(tmp_path, monkeypatch, open_files=2)
    put_many(writer, 60, 6)
    writer.flush()
    monkeypatch.undo()
    writer.close()

    assert not outcomes.refusals
    assert_capd_reads(writer.run, writer.held)


def test_a_log_outlives_its_records_until_their_shards_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    real_sync, real_unlink = open_files.sync_data, small_log.unlink

    def sync(fd: int) -> None:
        real_sync(fd)
        synced.add(os.fstat(fd).st_size)

    deletions: list[bool] = []

    def unlink(path: Path, *, missing_ok: bool = False) -> None:
        partials = path.parent.glob("*.partial")
        deletions.append(all(partial.stat().st_size in synced for partial in partials))
        real_unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(open_files, "sync_data", sync)
    monkeypatch.setattr(small_log, "unlink", unlink)
    writer = Writer(tmp_path, durability="durable", log_nbytes=600_000)
    for number in range(100):  # a chunk of this series holds eight records
        writer.put(key("x"), "float32", RNG.standard_normal((128, 256)).astype("f4"))
        if number % 3 == 2:  # logs go between two batches, not before a flush returns
            writer.flush()
    writer.flush()
    assert len(deletions) > 5
    assert all(deletions)
    monkeypatch.undo()
    writer.close()
    assert_capd_reads(writer.run, writer.held)


@pytest.mark.parametrize("durability", ["buffered", "durable"])
def test_documents_whose_sync_failed_are_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """The kernel calls pages clean that it could not write, and may forget them: the next sync proves nothing."""
    writer = Writer(tmp_path, durability=durability)
    lost: list[Path] = []
    real = layout.sync_paths

    def failing_once(paths: Any, root: Path) -> None:
        paths = list(paths)
        documents = [path for path in paths if path.name == "zarr.json"]
        if not lost and documents:
            lost.extend(documents)
            for path in documents:
                os.truncate(path, 0)
            raise OSError(errno.EIO, "Input/output error")
        real(paths, root)

    monkeypatch.setattr(layout, "sync_paths", failing_once)
    put_many(writer, 1, 1)
    if durability == "buffered":
        with pytest.raises(OSError, match="Input/output"):
            writer.pipeline.seal("run").result(timeout=30)
    writer.close()

    assert {path.parent.name for path in lost} >= {"data", "bf16", "rank0"}
    assert all(path.stat().st_size for path in lost)
    assert verify_run(writer.run).ok
    assert not writer.outcomes.refusals
    assert_zarr_readers_read(writer.run, writer.held)
