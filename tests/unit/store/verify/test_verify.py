"""`verify_run`: sound stores are sound at every moment, and every kind of damage is found where it is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from capd.errors import NotAStore
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.format.frames import Frame, FrameKind
from capd.store.scan.scan import ScannedShard, scan_shard
from capd.store.verify.damage import Damage, fold
from capd.store.verify.node import NodePromise, look_at_node
from capd.store.verify.run import verify_run
from tests.kit.store.damaging import edit_catalog, flip, frames, head, image, inside, spool
from tests.kit.store.writing import Writer, key
from tests.kit.tiers import rows

RNG = np.random.default_rng(11)
LARGE = "bf16/rank0/layer0/pre/tensor.forward.large"
SMALL = "bf16/rank0/layer0/pre/tensor.forward.small"


def put_all(writer: Writer, first: int, count: int) -> None:
    for iteration in range(first, first + count):
        writer.put(key("large"), "float32", RNG.standard_normal((300, 400)).astype("f4"), iteration=iteration)
        ragged = RNG.integers(0, 60_000, ((300, 7, 0, 299)[iteration % 4], 500), dtype="u2")
        writer.put(key("ragged"), "bfloat16", ragged, iteration=iteration)
        for call in range(30):
            bits = RNG.standard_normal((100, 8)).astype("f4")
            writer.put(key("small"), "float32", bits, iteration=iteration, call=call)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sealed run: five large records in three shards, ragged ones, 150 small ones in one shard."""
    writer = Writer(tmp_path_factory.mktemp("sound"), shard_nbytes=1 << 20)
    put_all(writer, 0, 5)
    writer.close()
    return writer.run


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    shutil.copytree(sound, tmp_path / "run.zarr")
    return tmp_path / "run.zarr"


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look follows at once."""
    monkeypatch.setattr("capd.store.verify.run._SECOND_LOOK_S", 0.01)


def shard(run: Path, series: str, number: int) -> Path:
    [path] = [path for path in (run / series / "data" / "c" / str(number)).rglob("*") if path.is_file()]
    return path


def lines(run: Path) -> list[str]:
    return [str(damage) for damage in verify_run(run).damaged]


def the_damage(run: Path) -> Damage:
    [damage] = verify_run(run).damaged
    return damage


def test_a_sealed_run_is_sound_and_every_record_is_counted(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    seen: list[int] = []

    report = verify_run(run, progress=seen.append)

    assert report.ok
    assert (report.damaged, report.notes) == ([], [])
    assert report.records == 160
    assert report.nbytes == sum(
        path.stat().st_size for path in run.glob("*/*/*/*/*/data/c/**/0") if path.is_file()
    )
    assert seen == sorted(seen)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_unsealed_and_killed_runs_are_sound_with_a_torn_tail_too(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a", shard_nbytes=1 << 20)
    put_all(writer, 0, 4)
    writer.flush()
    beside = verify_run(writer.run)
    killed = image(writer, tmp_path / "b")
    writer.close()
    for path in (killed / ".capd" / "node=n0" / "spool").iterdir():
        with path.open("ab") as file:
            file.write(b"CPDF" + os.urandom(3000))

    assert (beside.ok, beside.records) == (True, 128)
    assert (lines(killed), verify_run(killed).records) == ([], 128)


def test_a_daemon_at_work_gives_no_false_alarm(tmp_path: Path) -> None:
    writer = Writer(tmp_path, shard_nbytes=1 << 20, log_nbytes=100_000)
    put_all(writer, 0, 1)
    writer.flush()
    iterations = 1
    enough = threading.Event()  # some looks, however long each takes

    def work() -> None:
        nonlocal iterations
        while iterations < 15 or not enough.is_set():
            put_all(writer, iterations, 1)
            iterations += 1
            if iterations % 5 == 0:
                writer.pipeline.seal("run").result(timeout=60)

    thread = threading.Thread(target=work)
    thread.start()
    looks = 0
    try:
        while thread.is_alive():
            assert lines(writer.run) == []
            looks += 1
            if looks == 3:
                enough.set()
    finally:
        enough.set()
        thread.join()
    writer.close()
    assert looks >= 3
    assert (lines(writer.run), verify_run(writer.run).records) == ([], 32 * iterations)


def test_a_series_that_begins_while_the_run_is_checked_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path)
    put_all(writer, 0, 1)
    writer.flush()

    def look(*args: Any) -> NodePromise:
        node = look_at_node(*args)
        writer.put(key("new"), "float32", np.ones((300, 400), "f4"))
        writer.pipeline.seal("run").result(timeout=60)
        return node

    monkeypatch.setattr("capd.store.verify.run.look_at_node", look)
    assert lines(writer.run) == []
    writer.close()


def test_a_shard_that_gets_its_directories_while_the_run_is_checked_is_no_damage(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = run / LARGE / "data" / "c" / "17"
    begun.mkdir()
    exists = Path.exists

    def made(path: Path) -> bool:
        if path == begun / "0":  # nobody has asked for it before
            path.mkdir(exist_ok=True)
        return exists(path)

    monkeypatch.setattr(Path, "exists", made)
    assert lines(run) == []


def test_a_shard_that_gets_its_header_while_it_is_looked_at_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path)
    put_all(writer, 0, 1)
    writer.flush()
    begun = writer.run / ".capd" / "node=n0" / "spool" / "0123456789abcdef0123-00000000.partial"

    def scan(path: Path) -> ScannedShard | None:
        found = scan_shard(path)
        if path == begun:
            begun.write_bytes(b"CPDF" + bytes(300))
        return found

    def look(*args: Any) -> NodePromise:
        begun.write_bytes(b"")
        return look_at_node(*args)

    monkeypatch.setattr("capd.store.verify.node.scan_shard", scan)
    monkeypatch.setattr("capd.store.verify.run.look_at_node", look)
    assert lines(writer.run) == []
    begun.unlink()
    writer.close()


@pytest.mark.parametrize("where", [head, inside])
@pytest.mark.parametrize("kind", [FrameKind.HEADER, FrameKind.CHUNK, FrameKind.COMMIT])
def test_one_bit_in_any_frame_is_found_and_names_the_record(
    run: Path, kind: FrameKind, where: Callable[[Frame], int]
) -> None:
    path = shard(run, LARGE, 1)
    frame = frames(path, kind)[0]
    flip(path, where(frame))

    damage = the_damage(run)

    assert (damage.kind, damage.series, damage.node) == ("shard", LARGE, "n0")
    assert damage.file == str(path.relative_to(run))
    assert damage.records == (() if kind is FrameKind.HEADER else (2,))
    assert damage.offset is not None
    assert abs(damage.offset - frame.offset) <= 48


def test_a_damaged_chunk_of_small_records_names_all_that_share_it(run: Path) -> None:
    path = shard(run, SMALL, 0)
    flip(path, inside(frames(path, FrameKind.CHUNK)[-1]))

    assert the_damage(run).records == tuple(range(150))


def test_damage_to_the_index_names_the_records_that_no_reader_reaches(run: Path) -> None:
    path = shard(run, LARGE, 0)
    flip(path, path.stat().st_size - 10)

    assert the_damage(run).records == (0, 1)


def test_an_index_that_contradicts_the_commits_is_found(run: Path) -> None:
    """Its checksum is right: two records swapped, as a broken copying tool could do."""
    from capd.store.format.codecs import crc32c

    path = shard(run, LARGE, 0)
    content = bytearray(path.read_bytes())
    index = content[-36:-4]
    content[-36:-4] = index[16:] + index[:16]
    content[-4:] = crc32c(bytes(content[-36:-4])).to_bytes(4, "little")
    path.write_bytes(content)

    assert {damage.records for damage in verify_run(run).damaged} == {(0,), (1,)}


def test_missing_empty_cut_and_swapped_shards_are_found(run: Path, tmp_path: Path) -> None:
    for case in ("missing", "empty", "cut", "swapped"):
        copy = tmp_path / case / "run.zarr"
        shutil.copytree(run, copy)
        path, other = shard(copy, LARGE, 0), shard(copy, LARGE, 1)
        if case == "missing":
            path.unlink()
        elif case == "empty":
            path.write_bytes(b"")
        elif case == "cut":
            os.truncate(path, path.stat().st_size - 512)
        else:
            content = path.read_bytes()
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)

        touched = {record for damage in verify_run(copy).damaged for record in damage.records}

        assert touched == ({0, 1, 2, 3} if case == "swapped" else {0, 1}), case


@pytest.mark.parametrize(
    ("member", "value"),
    [("data_type", "float64"), ("shape", [6, 300, 400]), ("codecs", []), ("dimension_names", None)],
)
def test_array_metadata_is_compared_with_the_shards(run: Path, member: str, value: object) -> None:
    path = run / LARGE / "data" / "zarr.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, member: value}))

    found = verify_run(run).damaged

    assert found
    assert all(damage.series == LARGE for damage in found)


def test_published_moments_are_compared_with_the_commits(run: Path) -> None:
    path = run / LARGE / "zarr.json"
    document = json.loads(path.read_text())
    document["attributes"]["capd"]["records"]["iteration"][3] = 7
    path.write_text(json.dumps(document))

    damage = the_damage(run)

    assert (damage.kind, damage.records) == ("metadata", (3,))


@pytest.mark.parametrize(
    "file", ["zarr.json", "bf16/zarr.json", "bf16/rank0/layer0/zarr.json", f"{LARGE}/zarr.json"]
)
@pytest.mark.parametrize("content", [b"", b"{", None])
def test_group_metadata_that_is_no_json_or_missing_is_found(
    run: Path, file: str, content: bytes | None
) -> None:
    if content is None:
        (run / file).unlink()
    else:
        (run / file).write_bytes(content)

    assert file in {damage.file for damage in verify_run(run).damaged}


@pytest.mark.parametrize(
    ("statement", "records"),
    [
        ("UPDATE records SET body=changed(body, 'moment.iteration', '99') WHERE record=2", (2,)),
        ("UPDATE records SET body=changed(body, 'shape', '[300, 399]') WHERE record=2", (2,)),
        ("UPDATE records SET body=changed(body, 'stats.absmax', '1e9') WHERE record=2", (2,)),
        ("UPDATE records SET body=changed(body, 'metadata', '\"{}\"') WHERE record=2", (2,)),
        ("UPDATE records SET body=changed(body, 'stats.exponents', '[1, 1]') WHERE record=2", (2,)),
        ("UPDATE records SET attempt=1 WHERE record=2", ()),
        ("UPDATE records SET body=x'93' WHERE record=2", ()),
        ("UPDATE records SET body='text' WHERE record=2", ()),
        ("DELETE FROM records WHERE record=2", (2,)),
        ("DELETE FROM acked", (0, 1, 2, 3, 4)),
        ("UPDATE series SET raw_bytes=raw_bytes+1", ()),
        ("UPDATE series SET stored_bytes=0", ()),
        ("UPDATE series SET records=records+1", ()),
        ("DELETE FROM series", ()),
    ],
)
def test_the_catalog_is_compared_with_the_commits(
    run: Path, statement: str, records: tuple[int, ...]
) -> None:
    edit_catalog(run / ".capd" / "node=n0" / CATALOG_NAME, statement)

    found = verify_run(run).damaged

    assert found
    assert {damage.kind for damage in found} == {"catalog"}
    touched = {n for damage in found if damage.series == LARGE for n in damage.records}
    assert touched == set(records)


@pytest.mark.parametrize("content", rows([None, b"", b"\xff" * 9000], [b""]))
def test_a_missing_or_unreadable_catalog_is_damage(run: Path, content: bytes | None) -> None:
    path = run / ".capd" / "node=n0" / CATALOG_NAME
    path.unlink() if content is None else path.write_bytes(content)

    assert the_damage(run).kind == "catalog"


@pytest.mark.parametrize("left", ["no file", "an empty file", "a file without tables"])
def test_a_catalog_that_a_kill_amid_the_first_start_left_is_no_damage(tmp_path: Path, left: str) -> None:
    writer = Writer(tmp_path)
    writer.close()
    run = writer.run
    catalog = run / ".capd" / "node=n0" / CATALOG_NAME
    catalog.unlink()
    if left == "an empty file":
        catalog.touch()
    elif left == "a file without tables":
        with contextlib.closing(sqlite3.connect(catalog)) as database:
            database.execute("PRAGMA journal_mode=WAL")
        assert catalog.stat().st_size > 0

    found = verify_run(run)

    assert (found.damaged, found.records) == ([], 0)
    assert any("the next start creates it" in note for note in found.notes)


def test_damage_in_the_spool_is_found(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a", shard_nbytes=1 << 30)
    put_all(writer, 0, 3)
    writer.flush()
    run = image(writer, tmp_path / "b")
    writer.close()
    log = spool(run, "small-*.log")
    flip(log, inside(frames(log, FrameKind.RECORD)[7]))
    partials = {
        path: frames(path, FrameKind.CHUNK) for path in (run / ".capd/node=n0/spool").glob("*.partial")
    }
    [large] = [path for path, chunks in partials.items() if chunks[0].raw_nbytes == 480_000]
    flip(large, inside(partials[large][1]))

    found = {(damage.kind, damage.series, damage.records) for damage in verify_run(run).damaged}

    assert found == {("spool", SMALL, (7,)), ("spool", LARGE, (1,))}


def test_a_shard_that_a_zarr_tool_wrote_anew_is_a_note(run: Path) -> None:
    array = zarr.open_array(run / LARGE / "data", mode="r+")
    array[0] = array[0]

    report = verify_run(run)

    assert (report.ok, report.records) == (True, 160)
    assert any("has no journal" in note for note in report.notes)


def test_files_that_belong_to_nothing_are_notes(run: Path) -> None:
    (run / "README").write_text("mine")
    (run / LARGE / "data" / "c" / "0" / "notes.txt").write_text("mine")

    report = verify_run(run)

    assert report.ok
    assert sorted(note.partition(":")[0] for note in report.notes) == [
        "README",
        f"{LARGE}/data/c/0/notes.txt",
    ]


def test_long_series_are_compared_with_their_moments_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capd.store.format.columns.MAX_INLINE", 20)
    writer = Writer(tmp_path)
    for iteration in range(50):
        writer.put(key("small"), "float32", np.full((3, 4), iteration, "f4"), iteration=iteration)
    writer.close()
    assert lines(writer.run) == []
    moments = zarr.open_array(writer.run / SMALL / "moments", mode="r+")
    moments[30, 0] = 5

    damage = the_damage(writer.run)

    assert (damage.kind, damage.records) == ("metadata", (30,))
    [chunk] = [path for path in (writer.run / SMALL / "moments" / "c").rglob("*") if path.is_file()]
    flip(chunk, 20)
    assert {damage.kind for damage in verify_run(writer.run).damaged} == {"metadata"}


def foreign(path: Path) -> None:
    zarr.create_group(path)


def newer(path: Path) -> None:
    path.mkdir()
    attributes = {"capd": {"format": 99, "run_id": "x"}}
    document = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    (path / "zarr.json").write_text(json.dumps(document))
    (path / ".capd" / "node=n0").mkdir(parents=True)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.write_text("x"), foreign, newer])
def test_what_is_no_run_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x.zarr")
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(NotAStore):
        verify_run(tmp_path / "x.zarr")

    assert sorted(tmp_path.rglob("*")) == before


def some_offsets(path: Path) -> Iterator[int]:
    yield from sorted({int(n) for n in RNG.integers(0, path.stat().st_size, 12)})


def test_a_bit_anywhere_in_a_shard_is_found(run: Path) -> None:
    for series in (LARGE, SMALL):
        path = shard(run, series, 0)
        for offset in some_offsets(path):
            flip(path, offset)
            assert not verify_run(run).ok, (path, offset)
            flip(path, offset)
    assert verify_run(run).ok


def test_numbers_fold_into_ranges() -> None:
    assert fold([0]) == "0"
    assert fold([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
