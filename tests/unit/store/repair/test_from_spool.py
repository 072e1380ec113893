"""Copies in the spool outlast damage to sealed shards: a repair saves them, in their place if that is known."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import capd
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.rows import CATALOG_NAME, read_series
from capd.store.format.frames import FrameKind
from capd.store.repair.repair import repair
from capd.store.repair.result import Repair
from capd.store.run.run_store import RunStore
from capd.store.scan import survey
from capd.store.scan.described import described
from capd.store.verify.run import verify_run
from tests.kit.store.damaging import flip, frames, image, inside, quarantined, spool, without
from tests.kit.store.repairing import is_whole, lost, repaired, state
from tests.kit.store.shared_chunks import (
    SHARED,
    lose_catalog,
    lose_what_names_records,
    put_shared,
    sealed_shard,
)
from tests.kit.store.writing import Writer, key

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
    """Seal the full shard, and write the catalog's rows, which else come within a second."""
    writer.pipeline.post("run", RunStore.maintain).result(timeout=30)
    writer.pipeline.post("run", RunStore.flush_catalog).result(timeout=30)


def make(root: Path) -> tuple[Path, Writer]:
    """A shard of ten records that is sealed, and a log with them and five more that wait."""
    writer = Writer(root / "a", **OPTIONS)
    put(writer, *range(LAST + 1))
    maintain(writer)
    run = image(writer, root / "b")
    writer.close()
    assert sealed_shard(run).is_file()
    return run, writer


def saves(run: Path, writer: Writer, name: str, order: Sequence[int]) -> Repair:
    """A repair saves the records of these iterations, in this order, and every other series."""
    done, new = repaired(run)
    is_whole(new, without(writer.held, lambda other, m: other == name and m.iteration not in order))
    [series] = capd.open(new).find(tensor_name=name)
    assert [record.iteration for record in series.records] == list(order)
    return done


def saves_shared(run: Path, writer: Writer, order: Sequence[int] = range(LAST + 1)) -> Repair:
    return saves(run, writer, SHARED.tensor_name, order)


def damage(path: Path, kind: FrameKind = FrameKind.CHUNK, number: int = -1) -> None:
    flip(path, inside(frames(path, kind)[number]))


def test_a_damaged_chunk_of_a_sealed_shard_costs_nothing_that_a_log_holds(tmp_path: Path) -> None:
    run, writer = make(tmp_path)
    damage(sealed_shard(run))

    assert saves_shared(run, writer).is_complete


@pytest.mark.parametrize("columns", ["kept", "lost"])
def test_records_that_lost_their_names_come_back_from_a_log(tmp_path: Path, columns: str) -> None:
    run, writer = make(tmp_path)
    for kind in (FrameKind.CHUNK, FrameKind.COMMIT):
        damage(sealed_shard(run), kind)
    lose_what_names_records(run) if columns == "lost" else lose_catalog(run)

    assert saves_shared(run, writer).is_complete


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

    assert saves_shared(run, writer, range(8)).is_complete


def test_what_no_log_holds_soundly_is_lost_alone(tmp_path: Path) -> None:
    run, writer = make(tmp_path)
    damage(sealed_shard(run))
    damage(spool(run, "small-*.log"), FrameKind.RECORD, 3)

    done = saves_shared(run, writer, [n for n in range(LAST + 1) if n != 3])

    assert lost(done) == {SHARED.tensor_name: [3]}


def test_what_is_no_log_and_what_cannot_be_read_does_not_keep_a_run_from_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, writer = make(tmp_path)
    damage(sealed_shard(run))
    place = run / ".capd" / "node=n0" / "spool"
    (place / "small-00000007.log").symlink_to("nowhere")
    (place / "small-00000008.log").mkdir()
    real = survey.read_log

    def unreadable(path: Path) -> object:
        if path.name == "small-00000001.log":
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr(survey, "read_log", unreadable)
    shutil.copy(place / "small-00000000.log", place / "small-00000001.log")

    assert saves_shared(run, writer).is_complete


def test_a_log_of_another_run_gives_nothing(tmp_path: Path) -> None:
    run, _ = make(tmp_path)
    other = Writer(tmp_path / "c", run_id="other", **OPTIONS)
    put(other, *range(LAST + 1))  # the same captures by client and sequence
    foreign = spool(image(other, tmp_path / "d"), "small-*.log")
    other.close()
    spool(run, "small-*.log").unlink()
    shutil.copy(foreign, run / ".capd" / "node=n0" / "spool" / "small-00000007.log")
    damage(sealed_shard(run))

    before, new = (
        state(run),
        tmp_path / "new.zarr",
    )  # capd reads the foreign captures: client uuids are never equal

    done = repair(run, new)

    assert state(run) == before
    assert lost(done) == {SHARED.tensor_name: list(range(LAST + 1))}
    assert capd.open(new).series == []


def test_a_log_without_its_series_frame_still_has_the_records(tmp_path: Path) -> None:
    run, writer = make(tmp_path)
    damage(sealed_shard(run))
    damage(spool(run, "small-*.log"), FrameKind.SERIES, 0)

    assert saves_shared(run, writer).is_complete


def test_records_whose_series_is_lost_are_counted_as_unknown(tmp_path: Path) -> None:
    run, _ = make(tmp_path)
    log = spool(run, "small-*.log")
    lose_catalog(run)
    damage(log, FrameKind.SERIES, 0)

    done, _ = repaired(run)

    assert (done.saved, done.lost) == (LAST + 1 - 5, [])
    assert done.unknown == [f"{log}: 5 records whose series is lost"]
    assert not done.is_complete


LARGE = key("large")


def put_large(writer: Writer, *iterations: int) -> None:
    for iteration in iterations:
        bits = RNG.standard_normal((300, 400)).astype("f4")
        writer.put(LARGE, "float32", bits, iteration=iteration)
    writer.flush()


def large_shard(run: Path) -> Path:
    [path] = run.glob("*/rank0/layer0/pre/tensor.forward.large/data/c/0/0/0")
    return path


def saves_large(run: Path, writer: Writer, *order: int) -> Repair:
    return saves(run, writer, "large", order)


def test_a_sound_copy_in_an_open_shard_stands_in_for_the_sealed_one(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    put_large(writer, 0, 1, 2)
    writer.pipeline.seal("run").result(timeout=30)
    put_large(writer, 3)
    run = image(writer, tmp_path / "b")
    writer.close()
    damage(large_shard(run), number=1)
    damage(spool(run, "*.partial"))

    assert lost(saves_large(run, writer, 0, 1, 2)) == {"large": [3]}


def test_a_published_record_that_rotted_does_not_cost_those_of_the_open_shard(tmp_path: Path) -> None:
    """The open shard has the rotten copy too, and lost a COMMIT: it cannot be mended."""
    writer = Writer(tmp_path / "a")
    put_large(writer, 0, 1, 2)
    writer.pipeline.seal("run").result(timeout=30)
    put_large(writer, 3, 4, 5, 6)
    run = image(writer, tmp_path / "b")
    writer.close()
    damage(large_shard(run), number=1)
    damage(spool(run, "*.partial"), number=1)
    damage(spool(run, "*.partial"), FrameKind.COMMIT, 4)

    done = saves_large(run, writer, 0, 2, 3, 5, 6)

    assert lost(done)["large"] in ([1, 4], [1])  # a kill can leave a catalog that does not know of record 4


@pytest.mark.parametrize("what", ["header", "commit and names"])
def test_an_open_shard_goes_on_where_the_sealed_one_before_it_cannot_be_read(
    tmp_path: Path, what: str
) -> None:
    writer = Writer(tmp_path / "a", shard_nbytes=2 << 20)
    put_large(writer, *range(6))
    maintain(writer)
    run = image(writer, tmp_path / "b")
    writer.close()
    damage(
        large_shard(run),
        FrameKind.HEADER if what == "header" else FrameKind.COMMIT,
        0 if what == "header" else 1,
    )
    lose_catalog(run)
    if what != "header":
        [document] = run.glob("*/rank0/layer0/pre/tensor.forward.large/zarr.json")
        document.write_bytes(b"")

    saves_large(run, writer, *[n for n in range(6) if n != 1 or what == "header"])


@pytest.mark.parametrize("daemon", [True, False])
def test_records_in_a_log_go_on_behind_a_sealed_shard_without_a_header(tmp_path: Path, daemon: bool) -> None:
    writer = Writer(tmp_path / "a", **OPTIONS)
    put(writer, *range(7))
    writer.pipeline.seal("run").result(timeout=30)
    put(writer, 7, 8)
    run = image(writer, tmp_path / "b")
    writer.close()
    damage(sealed_shard(run), FrameKind.HEADER)
    lose_catalog(run)
    if daemon:
        Writer(run.parent, **OPTIONS).close()

    assert saves_shared(run, writer, range(9)).is_complete


@pytest.mark.parametrize("codec", ["default", "fast", "zstd:3", "none", "blosc:lz4:5:noshuffle"])
def test_documents_say_what_a_series_is_where_nothing_else_does(tmp_path: Path, codec: str) -> None:
    writer = Writer(tmp_path / "a", codec=codec)
    put_large(writer, 0, 1, 2)
    writer.close()
    run = writer.run
    with contextlib.closing(connect_read_only(run / ".capd" / "node=n0" / CATALOG_NAME)) as catalog:
        [kept] = [row.header for row in read_series(catalog)]
    damage(large_shard(run), FrameKind.HEADER)
    lose_catalog(run)

    assert described(run, kept.path) == (kept, "n0")
    assert [len(series.records) for series in capd.open(run).series] == [3]
    assert [one.kind for one in verify_run(run).damaged] == ["catalog", "shard"]

    assert saves_large(run, writer, 0, 1, 2).is_complete


def test_documents_that_capd_would_not_write_say_nothing(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    put_large(writer, 0)
    writer.close()
    path = "bf16/rank0/layer0/pre/tensor.forward.large"
    document = writer.run / path / "data" / "zarr.json"
    sound = document.read_text()
    for old, new in (
        ('"clevel": 1', '"clevel": 99'),
        ('"float32"', '"float64"'),
        ('"blosc"', '"gzip"'),
        ("[", "{"),
    ):
        document.write_text(sound.replace(old, new))
        assert described(writer.run, path) is None
    document.write_text(sound)
    assert described(writer.run, path) is not None


def test_an_open_shard_whose_records_are_others_than_the_sealed_ones_is_kept(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    put_large(writer, 0, 1)
    young = spool(image(writer, tmp_path / "b"), "*.partial")
    writer.close()
    again = Writer(tmp_path / "c")
    again.sequence, again.held = 100, {}
    put_large(again, 10, 11, 12)
    again.close()
    place = again.run / ".capd" / "node=n0" / "spool"
    shutil.copy(young, place / young.name)

    Writer(again.run.parent).close()

    assert young.name in quarantined(again.run)
    shutil.copy(young, place / young.name)
    again.held[LARGE, "float32"] += writer.held[LARGE, "float32"]
    assert saves_large(again.run, again, 10, 11, 12, 0, 1).is_complete
