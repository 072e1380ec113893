"""A small record that a log still holds outlasts the damage to its shard: repair puts it back in its place."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import capd
from capd.store import held_logs, repair
from capd.store.frames import Kind
from capd.store.repair import repair_node
from capd.store.run import RunStore
from capd.store.verify import verify_run
from tests.unit.store.damaging import flip, frames, image, inside, spool, without
from tests.unit.store.reading import assert_capd_reads, assert_zarr_readers_read
from tests.unit.store.test_recover_shared_chunks import (
    SHARED,
    lose_catalog,
    lose_what_names_records,
    put_shared,
    sealed_shard,
)
from tests.unit.store.writing import Writer

RNG = np.random.default_rng(17)
OPTIONS = {"shard_nbytes": 1 << 20}  # ten records in a shard
LAST = 14


def put(writer: Writer, *iterations: int) -> None:
    """Put records; the full chunks of ten move to their shard at once."""
    for iteration in iterations:
        bits = RNG.standard_normal((200, 128)).astype("f4")
        writer.put(SHARED, "float32", bits, iteration=iteration)
    writer.flush()


def maintain(writer: Writer) -> None:
    """A full shard is sealed behind this."""
    writer.pipeline.post("run", RunStore.maintain).result(timeout=30)


def make(root: Path) -> tuple[Path, Writer]:
    """A shard of ten records that is sealed, and a log with them and five more that wait."""
    writer = Writer(root / "a", **OPTIONS)
    put(writer, *range(LAST + 1))
    maintain(writer)
    run = image(writer, root / "b")
    writer.close()
    assert sealed_shard(run).is_file()
    return run, writer


def is_whole(run: Path, writer: Writer, order: Sequence[int] = range(LAST + 1)) -> None:
    """The records of these iterations are there, in this order, and what repair needed is gone."""
    held = without(writer.held, lambda name, m: name == SHARED.tensor_name and m.iteration not in order)
    assert [str(damage) for damage in verify_run(run).damaged] == []
    assert_capd_reads(run, held)
    assert_zarr_readers_read(run, held)
    [series] = capd.open(run).find(tensor_name=SHARED.tensor_name)
    assert [record.iteration for record in series.records] == list(order)
    node = run / ".capd" / "node=n0"
    assert not (node / "held").exists()
    assert not list((node / "spool").iterdir())


def damage(path: Path, kind: Kind = Kind.CHUNK, number: int = -1) -> None:
    flip(path, inside(frames(path, kind)[number]))


@pytest.mark.parametrize("links", ["hard", "none"])
def test_a_damaged_chunk_of_a_sealed_shard_costs_nothing_that_a_log_holds(
    tmp_path: Path, links: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, writer = make(tmp_path)
    damage(sealed_shard(run))
    if links == "none":
        monkeypatch.setattr(held_logs, "link", _refuse)

    done = repair_node(run, "n0")

    [rebuilt] = done.rebuilt
    assert (rebuilt.lost, rebuilt.kept) == ({}, LAST + 1)
    is_whole(run, writer)


@pytest.mark.parametrize("columns", ["kept", "lost"])
def test_a_log_knows_a_record_of_which_nothing_else_tells_more_than_its_moment(
    tmp_path: Path, columns: str
) -> None:
    """columns lost: not even that."""
    run, writer = make(tmp_path)
    for kind in (Kind.CHUNK, Kind.COMMIT):
        damage(sealed_shard(run), kind)
    lose_what_names_records(run) if columns == "lost" else lose_catalog(run)

    done = repair_node(run, "n0")

    assert not any(rebuilt.lost for rebuilt in done.rebuilt)
    is_whole(run, writer)
    [series] = capd.open(run).find(tensor_name=SHARED.tensor_name)
    assert all(record.stats.count == 200 * 128 for record in series.records)


def test_a_damaged_chunk_of_an_open_shard_costs_nothing_that_a_log_holds(tmp_path: Path) -> None:
    """Records that wait cannot join their chunk, as long as it is damaged."""
    writer = Writer(tmp_path / "a")
    put_shared(writer, *range(5))
    put_shared(writer, 5, 6)
    writer.put(SHARED, "float32", RNG.standard_normal((200, 128)).astype("f4"), iteration=7)
    writer.flush()
    run = image(writer, tmp_path / "b")
    writer.close()
    damage(spool(run, "*.partial"))

    repair_node(run, "n0")

    is_whole(run, writer, range(8))


def test_what_no_log_holds_soundly_is_lost_alone(tmp_path: Path) -> None:
    run, writer = make(tmp_path)
    damage(sealed_shard(run))
    damage(spool(run, "small-*.log"), Kind.RECORD, 3)

    done = repair_node(run, "n0")

    [rebuilt] = done.rebuilt
    assert list(rebuilt.lost) == [3]
    is_whole(run, writer, [n for n in range(LAST + 1) if n != 3])


def test_what_is_no_log_and_what_cannot_be_read_does_not_keep_a_run_from_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, writer = make(tmp_path)
    damage(sealed_shard(run))
    place = run / ".capd" / "node=n0" / "spool"
    (place / "small-00000007.log").symlink_to("nowhere")
    (place / "small-00000008.log").mkdir()
    real = held_logs.read_log

    def unreadable(path: Path, *, check: bool) -> object:
        if path.name == "small-00000001.log":
            raise OSError(errno.EIO, "Input/output error")
        return real(path, check=check)

    monkeypatch.setattr(held_logs, "read_log", unreadable)
    monkeypatch.setattr(held_logs, "is_the_files_fault", lambda error, path: True)
    shutil.copy(place / "small-00000000.log", place / "small-00000001.log")

    repair_node(run, "n0")

    is_whole(run, writer)


def test_two_records_of_one_moment_are_not_taken_for_each_other(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a", **OPTIONS)
    put(writer, *[0] * 10, 1)
    maintain(writer)
    run = image(writer, tmp_path / "b")
    writer.close()
    for kind in (Kind.CHUNK, Kind.COMMIT):
        damage(sealed_shard(run), kind)
    lose_catalog(run)

    done = repair_node(run, "n0")

    assert [list(rebuilt.lost) for rebuilt in done.rebuilt] == [list(range(10))]
    is_whole(run, writer, [1])


@pytest.mark.parametrize("daemon", [True, False])
@pytest.mark.parametrize("step", ["_seal", "verify_run", "_rebuild", "rebuild_catalog"])
def test_an_interrupted_repair_still_has_the_logs(
    tmp_path: Path, step: str, daemon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """daemon: one works in between, and gives its own logs the numbers of those that went."""
    run, writer = make(tmp_path)
    damage(sealed_shard(run))
    with monkeypatch.context() as patch:
        patch.setattr(repair, step, _stop)
        with pytest.raises(KeyboardInterrupt):
            repair_node(run, "n0")
    last = LAST
    if daemon:
        again = Writer(run.parent, **OPTIONS)
        again.sequence, again.held, last = writer.sequence, writer.held, LAST + 1
        put(again, last)
        again.close()

    repair_node(run, "n0")

    is_whole(run, writer, range(last + 1))


def _refuse(*_: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def _stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
