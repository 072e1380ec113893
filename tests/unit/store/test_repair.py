"""Repair keeps every sound record, in order and without holes, and a kill at any step only means doing it again."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr

import capd
from capd.errors import DamagedRecord, NothingMatched
from capd.store import new_catalog, rebuild, repair, spool_copies
from capd.store.catalog_open import connect_read_only
from capd.store.catalog_read import CATALOG_NAME, SessionRow
from capd.store.frames import FRAME_NBYTES, Kind
from capd.store.new_catalog import rebuild_catalog
from capd.store.partials import partial_path
from capd.store.repair import repair_node, take_over
from capd.store.verify import verify_run
from tests.unit.store.damaging import edit_catalog, flip, frames, image, inside, quarantined, spool, without
from tests.unit.store.reading import Held, assert_capd_reads, assert_zarr_readers_read
from tests.unit.store.writing import Writer, key

RNG = np.random.default_rng(13)
LARGE = "bf16/rank0/layer0/pre/tensor.forward.large"
SMALL = "bf16/rank0/layer0/pre/tensor.forward.small"
Made = tuple[Path, Held]


def put_all(writer: Writer, count: int) -> None:
    for iteration in range(count):
        writer.put(key("large"), "float32", RNG.standard_normal((300, 400)).astype("f4"), iteration=iteration)
        for call in range(20):
            bits = RNG.standard_normal((250, 64)).astype("f4")  # 16 records share a chunk
            writer.put(key("small"), "float32", bits, iteration=iteration, call=call)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A sealed run: five large records in three shards, a hundred small ones in seven shards of one chunk."""
    writer = Writer(tmp_path_factory.mktemp("made"), shard_nbytes=1 << 20)
    put_all(writer, 5)
    writer.close()
    return writer.run, writer.held


@pytest.fixture
def run(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to be damaged."""
    monkeypatch.setattr("capd.store.verify._SECOND_LOOK_S", 0.01)
    shutil.copytree(made[0], tmp_path / "run.zarr")
    return tmp_path / "run.zarr"


def shard(run: Path, series: str, number: int) -> Path:
    [path] = [path for path in (run / series / "data" / "c" / str(number)).rglob("*") if path.is_file()]
    return path


def is_whole(run: Path, held: Held) -> None:
    assert [str(damage) for damage in verify_run(run).damaged] == []
    assert_capd_reads(run, held)
    assert_zarr_readers_read(run, held)


def reads_nothing_wrong(run: Path, held: Held) -> None:
    """Whatever capd reads is what was captured at that moment; a damaged record raises."""
    bits = {(k.tensor_name, m.iteration, m.call): b for (k, _), records in held.items() for m, b in records}
    for series in capd.open(run).series:
        for i, record in enumerate(series.records):
            with contextlib.suppress(DamagedRecord):
                expected = bits[series.key.tensor_name, record.iteration, record.call]
                assert np.array_equal(series.numpy(i), expected)


def goes_on(run: Path, held: Held) -> None:
    """The next daemon takes more records of the same series."""
    writer = Writer(run.parent, shard_nbytes=1 << 20)
    writer.sequence, writer.held = 10_000, {identity: list(records) for identity, records in held.items()}
    writer.put(key("large"), "float32", np.ones((300, 400), "f4"), iteration=90)
    writer.put(key("small"), "float32", np.ones((250, 64), "f4"), iteration=90)
    writer.close()
    is_whole(run, writer.held)


def test_a_sound_run_stays_as_it_is(run: Path, made: Made) -> None:
    before = {path: path.read_bytes() for path in run.rglob("data/c/**/*") if path.is_file()}

    done = repair_node(run, "n0")

    assert (done.rebuilt, done.messages, quarantined(run)) == ([], [], [])
    assert {path: path.read_bytes() for path in run.rglob("data/c/**/*") if path.is_file()} == before


def test_a_damaged_record_goes_and_the_others_close_ranks(run: Path, made: Made) -> None:
    path = shard(run, LARGE, 1)
    flip(path, inside(frames(path, Kind.CHUNK)[0]))

    done = repair_node(run, "n0")

    [rebuilt] = done.rebuilt
    assert (rebuilt.path, sorted(rebuilt.lost), rebuilt.kept) == (LARGE, [2], 4)
    lost = rebuilt.lost[2]
    assert lost is not None
    assert lost.moment.iteration == 2
    held = without(made[1], lambda name, m: name == "large" and m.iteration == 2)
    is_whole(run, held)
    old = zarr.open_array(rebuilt.quarantine / "data", mode="r")
    assert old.shape[0] == 5
    report = json.loads(rebuilt.quarantine.with_name(f"{rebuilt.quarantine.name}.json").read_text())
    assert (report["series"], [entry["record"] for entry in report["lost"]]) == (LARGE, [2])
    goes_on(run, held)


def test_a_damaged_chunk_of_small_records_costs_the_records_in_it(run: Path, made: Made) -> None:
    path = shard(run, SMALL, 2)
    flip(path, inside(frames(path, Kind.CHUNK)[-1]))

    [rebuilt] = repair_node(run, "n0").rebuilt

    assert sorted(rebuilt.lost) == list(range(32, 48))
    held = without(made[1], lambda name, m: name == "small" and 32 <= m.iteration * 20 + m.call < 48)
    is_whole(run, held)
    goes_on(run, held)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path, path.stat().st_size - 10),  # index
        lambda path: flip(path, inside(frames(path, Kind.COMMIT)[0])),
        lambda path: flip(path, inside(frames(path, Kind.HEADER)[0])),
        lambda path: flip(path, frames(path, Kind.CHUNK)[0].offset - 30),
    ],
    ids=["index", "commit", "header", "chunk header"],
)
@pytest.mark.parametrize("series", [LARGE, SMALL])
def test_what_is_written_twice_is_repaired_without_loss(
    run: Path, made: Made, series: str, damage: Callable[[Path], None]
) -> None:
    damage(shard(run, series, 1))
    assert not verify_run(run).ok

    [rebuilt] = repair_node(run, "n0").rebuilt

    assert rebuilt.lost == {}
    is_whole(run, made[1])


@pytest.mark.parametrize("ruin", [lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_a_missing_or_empty_shard_costs_its_records(
    run: Path, made: Made, ruin: Callable[[Path], object]
) -> None:
    ruin(shard(run, LARGE, 0))

    [rebuilt] = repair_node(run, "n0").rebuilt

    assert sorted(rebuilt.lost) == [0, 1]
    held = without(made[1], lambda name, m: name == "large" and m.iteration < 2)
    is_whole(run, held)
    goes_on(run, held)


def test_a_series_without_a_sound_record_goes_as_a_whole(run: Path, made: Made) -> None:
    for number in range(3):
        shard(run, LARGE, number).write_bytes(b"")

    [rebuilt] = repair_node(run, "n0").rebuilt

    assert rebuilt.kept == 0
    assert not (run / LARGE).exists()
    is_whole(run, without(made[1], lambda name, m: name == "large"))
    goes_on(run, without(made[1], lambda name, m: name == "large"))


def test_damage_with_waiting_small_records_loses_and_repeats_none(tmp_path: Path) -> None:
    """The sealed shard that the waiting records belong to has a damaged index: they cannot be sealed before it is
    built anew, and their log also holds records that are sealed already."""
    writer = Writer(tmp_path / "a")
    put_all(writer, 1)
    writer.flush()
    old = spool(image(writer, tmp_path / "b"), "small-*.log")
    writer.pipeline.seal("run").result(timeout=30)
    for call in range(5):
        writer.put(key("small"), "float32", np.full((250, 64), call, "f4"), iteration=1, call=call)
    writer.flush()
    run = image(writer, tmp_path / "c")
    writer.close()
    log = spool(run, "small-*.log")
    begin = frames(log, Kind.SERIES)[0].offset - FRAME_NBYTES
    log.write_bytes(old.read_bytes() + log.read_bytes()[begin:])  # one log with all 25, twenty of them sealed
    path = shard(run, SMALL, 0)
    flip(path, path.stat().st_size - 10)
    flip(path, inside(frames(path, Kind.CHUNK)[0]))  # records 0 to 15

    repair_node(run, "n0")

    is_whole(run, writer.held)  # the log has them all
    assert not list((run / ".capd" / "node=n0" / "spool").iterdir())


def test_damaged_small_records_no_longer_keep_their_series_from_sealing(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    put_all(writer, 1)
    writer.flush()
    run = image(writer, tmp_path / "b")
    writer.close()
    log = spool(run, "small-*.log")
    flip(log, inside(frames(log, Kind.RECORD)[17]))  # the first sixteen stand in a shard already

    repair_node(run, "n0")

    is_whole(run, without(writer.held, lambda name, m: name == "small" and m.call == 17))
    assert log.name in quarantined(run)


@pytest.mark.parametrize(
    "file", ["zarr.json", "bf16/zarr.json", f"{LARGE}/zarr.json", f"{LARGE}/data/zarr.json"]
)
@pytest.mark.parametrize("content", [b"", b"[]", None])
def test_damaged_metadata_is_written_anew(run: Path, made: Made, file: str, content: bytes | None) -> None:
    (run / file).unlink() if content is None else (run / file).write_bytes(content)

    repair_node(run, "n0")

    is_whole(run, made[1])


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM series",
        "UPDATE records SET body=changed(body, 'moment.iteration', '9')",
        "UPDATE records SET attempt=9",
        "UPDATE records SET body=x'93'",
        "UPDATE series SET records=1",
        "DELETE FROM acked",
    ],
)
def test_a_catalog_that_contradicts_the_frames_is_made_anew(run: Path, made: Made, statement: str) -> None:
    edit_catalog(run / ".capd" / "node=n0" / CATALOG_NAME, statement)
    assert not verify_run(run).ok

    repair_node(run, "n0")

    is_whole(run, made[1])


# -- interrupted ------------------------------------------------------------------------------------------------------

STEPS = ("rename", "exchange", "write_file", "sync_paths", "make_directory", "remove_tree", "link")


@pytest.mark.parametrize("exchangeable", [True, False])
def test_a_kill_at_any_step_only_means_repairing_again(
    tmp_path: Path, exchangeable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stops before each mutation in turn; then a daemon starts, and then another repair."""
    monkeypatch.setattr("capd.store.verify._SECOND_LOOK_S", 0.01)
    writer = Writer(tmp_path)
    for iteration in range(4):
        if iteration == 3:  # the last stand in the spool
            writer.pipeline.seal("run").result(timeout=30)
        writer.put(key("large"), "float32", RNG.standard_normal((300, 400)).astype("f4"), iteration=iteration)
        writer.put(key("small"), "float32", RNG.standard_normal((30, 40)).astype("f4"), iteration=iteration)
    writer.flush()
    run = image(writer, tmp_path / "image")
    writer.close()
    large = partial_path(run / ".capd" / "node=n0" / "spool", LARGE, 0)
    for path in (shard(run, LARGE, 0), large):
        flip(path, inside(frames(path, Kind.CHUNK)[0]))
    held = without(writer.held, lambda name, m: name == "large" and m.iteration == 0)
    stopped = 0
    for number in range(200):
        copy = tmp_path / f"k{number}" / "run.zarr"
        shutil.copytree(run, copy)
        left = [number]
        with monkeypatch.context() as patch:
            for module in (rebuild, repair, new_catalog, spool_copies):
                for name in STEPS:
                    if hasattr(module, name):
                        patch.setattr(module, name, _stopping(getattr(module, name), left))
            if not exchangeable:
                patch.setattr(rebuild, "exchange", _refusing)
            try:
                repair_node(copy, "n0")
            except _Stopped:
                stopped += 1
            else:
                break
        Writer(copy.parent).close()
        reads_nothing_wrong(copy, writer.held)
        assert {(d.kind, d.records) for d in verify_run(copy).damaged} <= {
            ("shard", (0,))
        }  # as it was, or gone
        repair_node(copy, "n0")
        is_whole(copy, held)
        assert not [name for name in quarantined(copy) if name.endswith((".building", ".rebuilt"))]
        shutil.rmtree(copy.parent)
    assert stopped >= 10


class _Stopped(BaseException):
    """The process ends here."""


def _stopping(real: Callable[..., object], left: list[int]) -> Callable[..., object]:
    def call(*arguments: object, **options: object) -> object:
        if left[0] == 0:
            raise _Stopped
        left[0] -= 1
        return real(*arguments, **options)

    return call


def _refusing(*_: object) -> None:
    raise OSError(22, "Invalid argument")


# -- the catalog ------------------------------------------------------------------------------------------------------


def tables(run: Path) -> dict[str, list[tuple[object, ...]]]:
    """Every table of the catalog, with paths for series ids."""
    database = connect_read_only(run / ".capd" / "node=n0" / CATALOG_NAME)
    try:
        paths = dict(database.execute("SELECT id, path FROM series"))
        found: dict[str, list[tuple[object, ...]]] = {}
        for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall():
            rows = database.execute(f"SELECT * FROM {name}").fetchall()  # noqa: S608 - a table of ours
            if name in ("series", "records"):
                rows = [(paths[row[0]], *row[1:]) for row in rows]
            found[name] = sorted(rows, key=repr)
        return found
    finally:
        database.close()


def test_the_catalog_rebuilt_from_frames_equals_the_one_it_replaces(tmp_path: Path) -> None:
    """Large, small, ragged, variants, empty, repeated, several clients and restarts, sealed and continued, sessions."""
    for attempt in range(2):
        writer = Writer(tmp_path, shard_nbytes=1 << 20)
        writer.sequence = attempt * 1000
        for iteration in range(4):
            moment = {"iteration": iteration, "attempt": attempt}
            put = writer.put
            put(key("large"), "float32", RNG.standard_normal((300, 400)).astype("f4"), **moment)
            put(key("same"), "float32", np.ones((300, 400), "f4"), **moment)
            for rows in (3, 0, 700, 90):
                bits = RNG.integers(0, 60_000, (rows, 500), dtype="u2")
                put(key("ragged"), "bfloat16", bits, call=rows, **moment)
            bits = RNG.integers(0, 256, (40, 40), dtype="u1")
            put(key("scale"), "float8_e8m0fnu", bits, **moment)
            put(key("odd"), "float32", np.array([np.nan, np.inf, -0.0, 1e-42], "f4"), **moment)
            put(key("big"), "int64", np.array([2**63 - 1, -(2**63)], "i8"), **moment)
            for call in range(30):
                put(key("small"), "float32", RNG.standard_normal((100, 8)).astype("f4"), call=call, **moment)
        writer.flush()
        if attempt:
            session = SessionRow(b"0123456789abcdef", 0, 1, "h", 1, 2, 3, "ended", 400, 400, 0, {}, [])
            writer.pipeline.save_session("run", session).result(timeout=30)
        writer.close()
    before = tables(writer.run)
    assert {name: bool(rows) for name, rows in before.items()} == dict.fromkeys(before, True)
    assert len(before["records"]) == 2 * 4 * 39

    rebuild_catalog(writer.run, "n0")

    assert tables(writer.run) == before
    assert verify_run(writer.run).ok
    node = writer.run / ".capd" / "node=n0"
    assert [path.name for path in node.glob("catalog*")] == [CATALOG_NAME]


@pytest.mark.parametrize("step", ["forget_completeness", "open_alone", "unlink", "rename", "sync_paths"])
def test_an_interrupted_rebuild_leaves_a_catalog_that_the_next_start_completes(
    run: Path, made: Made, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(new_catalog, step, _stopping(getattr(new_catalog, step), [0]))
        with pytest.raises(_Stopped):
            rebuild_catalog(run, "n0")

    Writer(run.parent).close()

    is_whole(run, made[1])


# -- a dead node's spool ----------------------------------------------------------------------------------------------


def test_taking_over_seals_what_a_dead_node_left(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a", node="n7")
    put_all(writer, 2)
    writer.flush()
    run = image(writer, tmp_path / "b")
    writer.close()

    with pytest.raises(NothingMatched, match="n7"):
        take_over(run, "n8")
    take_over(run, "n7")

    is_whole(run, writer.held)
    assert not list((run / ".capd" / "node=n7" / "spool").iterdir())


def test_repair_survives_a_real_kill(run: Path, made: Made) -> None:
    """SIGKILL between the exchange and what follows it, in a process of its own."""
    path = shard(run, LARGE, 1)
    flip(path, inside(frames(path, Kind.CHUNK)[0]))
    program = (
        "import os, signal, sys, pathlib\n"
        "from capd.store import rebuild, repair\n"
        "real = rebuild.exchange\n"
        "def exchange(a, b):\n    real(a, b)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "rebuild.exchange = exchange\n"
        "repair.repair_node(pathlib.Path(sys.argv[1]), 'n0')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(run)], check=False, timeout=60)
    assert ended.returncode == -9

    held = without(made[1], lambda name, m: name == "large" and m.iteration == 2)
    goes_on(run, held)
