"""A repair saves every record that reads in a new run, bit for bit, and leaves the damaged run as it is."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import capd
from capd.errors import ConfigError, NotAStore, StoreBusy, StoreError, StoreFull
from capd.store.catalog.rows import CATALOG_NAME, SessionRow
from capd.store.format.frames import FrameKind
from capd.store.repair import repair as repairs
from capd.store.repair.repair import repair
from tests.kit.store.damaging import edit_catalog, flip, frames, head, image, inside, without
from tests.kit.store.repairing import Made, is_whole, lost, put_all, repaired, state
from tests.kit.store.writing import Writer, key
from tests.kit.tiers import rows

RNG = np.random.default_rng(13)
LARGE = "bf16/rank0/layer0/pre/tensor.forward.large"
SMALL = "bf16/rank0/layer0/pre/tensor.forward.small"


def shard(run: Path, series: str, number: int) -> Path:
    [path] = [path for path in (run / series / "data" / "c" / str(number)).rglob("*") if path.is_file()]
    return path


def test_a_sound_run_comes_out_whole(run: Path, made: Made) -> None:
    done, new = repaired(run)

    assert done.is_complete
    assert done.saved == 105
    is_whole(new, made[1])


def test_a_repaired_run_goes_on(run: Path, made: Made) -> None:
    flip(shard(run, LARGE, 1), inside(frames(shard(run, LARGE, 1), FrameKind.CHUNK)[0]))
    _, new = repaired(run)

    writer = Writer(new.parent, run_id="new", shard_nbytes=1 << 20)
    writer.sequence = 10_000
    writer.held = without(made[1], lambda name, m: name == "large" and m.iteration == 2)
    writer.put(key("large"), "float32", np.ones((300, 400), "f4"), iteration=90)
    writer.put(key("small"), "float32", np.ones((250, 64), "f4"), iteration=90)
    writer.close()

    is_whole(new, writer.held)


def test_a_damaged_record_is_named_and_all_others_are_saved(run: Path, made: Made) -> None:
    path = shard(run, LARGE, 1)
    flip(path, inside(frames(path, FrameKind.CHUNK)[0]))

    done, new = repaired(run)

    [one] = done.lost
    assert (one.path, one.key, one.number) == (LARGE, key("large"), 2)
    assert one.row is not None
    assert one.row.moment.iteration == 2
    is_whole(new, without(made[1], lambda name, m: name == "large" and m.iteration == 2))


def test_a_damaged_chunk_of_small_records_costs_the_records_in_it(run: Path, made: Made) -> None:
    path = shard(run, SMALL, 2)
    flip(path, inside(frames(path, FrameKind.CHUNK)[-1]))

    done, new = repaired(run)

    assert lost(done) == {"small": list(range(32, 48))}
    is_whole(new, without(made[1], lambda name, m: name == "small" and 32 <= m.iteration * 20 + m.call < 48))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path, path.stat().st_size - 10),  # index
        lambda path: flip(path, inside(frames(path, FrameKind.COMMIT)[0])),
        lambda path: flip(path, head(frames(path, FrameKind.COMMIT)[0])),
        lambda path: flip(path, inside(frames(path, FrameKind.HEADER)[0])),
        lambda path: flip(path, frames(path, FrameKind.CHUNK)[0].offset - 30),
    ],
    ids=["index", "commit", "commit header", "header", "chunk header"],
)
@pytest.mark.parametrize("catalog", rows(["kept", "lost"], ["lost"]))
@pytest.mark.parametrize("series", [LARGE, SMALL])
def test_what_is_written_twice_is_saved_without_loss(
    run: Path, made: Made, series: str, catalog: str, damage: Callable[[Path], None]
) -> None:
    damage(shard(run, series, 1))
    if catalog == "lost":
        (run / ".capd" / "node=n0" / CATALOG_NAME).unlink()

    done, new = repaired(run)

    assert done.is_complete
    is_whole(new, made[1])


@pytest.mark.parametrize("ruin", [lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("catalog", rows(["kept", "lost"], ["lost"]))
def test_a_missing_or_empty_shard_costs_its_records(
    run: Path, made: Made, catalog: str, ruin: Callable[[Path], object]
) -> None:
    ruin(shard(run, LARGE, 0))
    if catalog == "lost":
        (run / ".capd" / "node=n0" / CATALOG_NAME).unlink()

    done, new = repaired(run)

    assert lost(done) == {"large": [0, 1]}
    assert all(one.row is not None for one in done.lost)
    is_whole(new, without(made[1], lambda name, m: name == "large" and m.iteration < 2))


def test_a_series_without_a_sound_record_is_lost_as_a_whole(run: Path, made: Made) -> None:
    for number in range(3):
        shard(run, LARGE, number).write_bytes(b"")

    done, new = repaired(run)

    assert lost(done) == {"large": list(range(5))}
    assert not (new / LARGE).exists()
    is_whole(new, without(made[1], lambda name, m: name == "large"))


def test_a_series_of_which_nothing_says_what_it_is_is_named(run: Path, made: Made) -> None:
    for number in range(3):
        shard(run, LARGE, number).write_bytes(b"")
    (run / LARGE / "zarr.json").unlink()
    (run / ".capd" / "node=n0" / CATALOG_NAME).unlink()

    done, new = repaired(run)

    assert (done.unknown, done.lost, done.is_complete) == ([LARGE], [], False)
    is_whole(new, without(made[1], lambda name, m: name == "large"))


@pytest.mark.parametrize(
    "file",
    ["bf16/zarr.json", f"{LARGE}/zarr.json", f"{LARGE}/data/zarr.json", f".capd/node=n0/{CATALOG_NAME}"],
)
@pytest.mark.parametrize("content", rows([b"", b"[]", None], [b"[]"]))
def test_damaged_metadata_costs_nothing(run: Path, made: Made, file: str, content: bytes | None) -> None:
    (run / file).unlink() if content is None else (run / file).write_bytes(content)

    done, new = repaired(run)

    assert done.is_complete
    is_whole(new, made[1])


def test_without_its_own_directory_a_run_is_saved_from_its_shards(run: Path, made: Made) -> None:
    shutil.rmtree(run / ".capd")

    done, new = repaired(run)

    assert done.is_complete
    assert [path.name for path in (new / ".capd").glob("node=*")] == ["node=n0"]
    is_whole(new, made[1])


@pytest.mark.parametrize("content", rows([b"", b"[]", None], [b""]))
def test_a_run_that_says_no_more_that_it_is_one_is_refused(run: Path, content: bytes | None) -> None:
    (run / "zarr.json").unlink() if content is None else (run / "zarr.json").write_bytes(content)
    before = state(run)

    with pytest.raises(NotAStore):
        repair(run, run.with_name("new.zarr"))

    assert state(run) == before


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
def test_the_frames_go_before_a_catalog_that_contradicts_them(run: Path, made: Made, statement: str) -> None:
    edit_catalog(run / ".capd" / "node=n0" / CATALOG_NAME, statement)

    before = state(run)
    done = repair(run, run.with_name("new.zarr"))

    assert state(run) == before
    assert done.is_complete
    is_whole(run.with_name("new.zarr"), made[1])


def test_everything_that_a_reader_sees_is_carried_over(tmp_path: Path) -> None:
    """Two nodes, variants, ragged and empty records, restarts, statistics alone, sessions; sealed, open and logged."""
    for node in ("n0", "n1"):
        writer = Writer(tmp_path / "a", node=node, shard_nbytes=1 << 20)
        rank = int(node[1])
        for attempt in range(2):
            for length in (300, 0, 3, 700):
                bits = RNG.integers(0, 60_000, (length, 400), dtype="u2")
                writer.put(key("large", rank=rank), "bfloat16", bits, iteration=length, attempt=attempt)
            writer.put(key("scalar", rank=rank), "int64", np.array(2**62, "i8"), attempt=attempt)
            for call in range(30):
                small = RNG.standard_normal((100, 8)).astype("f4")
                writer.put(key("small", rank=rank), "float32", small, call=call, attempt=attempt)
            writer.put_statistics(
                key("kept", rank=rank), "float32", RNG.standard_normal(9).astype("f4"), attempt=attempt
            )
            writer.flush()
            if attempt == 0:
                writer.pipeline.seal("run").result(timeout=30)
        session = SessionRow(
            b"0123456789abcdef", 0, 1, node, 1, 2, 3, "ended", 400, 400, 0, {"ring_full": 3}, []
        )
        writer.pipeline.save_session("run", session).result(timeout=30)
        run = image(writer, tmp_path / f"image-{node}")
        writer.close()
        shutil.rmtree(writer.run)
        shutil.copytree(run, writer.run)
    run = writer.run

    done, new = repaired(run)

    assert done.is_complete
    before, after = capd.open(run), capd.open(new)
    assert [(s.path, s.attributes, s.shape) for s in after.series] == [
        (s.path, s.attributes, s.shape) for s in before.series
    ]
    for old, saved in zip(before.series, after.series, strict=True):
        assert [record.time_ns for record in saved.records] == [record.time_ns for record in old.records]
    assert after.sessions == before.sessions
    assert after.totals().dropped == {"ring_full": 6}


# -- where the new run may be -----------------------------------------------------------------------------------------


def test_a_place_that_cannot_be_is_refused_and_nothing_is_written(run: Path, tmp_path: Path) -> None:
    (tmp_path / "there.zarr").mkdir()
    (tmp_path / "link.zarr").symlink_to("nowhere")
    (tmp_path / "beside").symlink_to(run)
    before = sorted(tmp_path.rglob("*"))

    for name, why in (
        ("there.zarr", "exists already"),
        ("link.zarr", "exists already"),
        ("run.zarr", "exists already"),
        ("run.zarr/new.zarr", "is inside"),
        ("beside/new.zarr", "is inside"),
        ("new", "ends in .zarr"),
    ):
        with pytest.raises(ConfigError, match=why):
            repair(run, tmp_path / name)

    assert sorted(tmp_path.rglob("*")) == before


def test_too_small_a_disk_is_refused_before_anything_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.rglob("*"))
    real = os.statvfs

    def small(path: object) -> object:
        found = real(path)  # type: ignore[arg-type]
        return os.statvfs_result((found.f_bsize, 1, 100, 3, 3, 100, 100, 100, found.f_flag, found.f_namemax))

    monkeypatch.setattr(os, "statvfs", small)
    with pytest.raises(StoreFull, match="another file system"):
        repair(run, tmp_path / "new.zarr")

    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("number", rows([errno.ENOSPC, errno.EIO], [errno.ENOSPC]))
@pytest.mark.parametrize("after", rows([0, 3, 40], [3]))
def test_a_disk_that_fails_leaves_nothing_half_made(
    run: Path, tmp_path: Path, after: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state(run)
    left = iter(range(after, -1, -1))
    real = os.pwritev

    def fails(*arguments: object) -> object:
        if next(left, 0) == 0:
            raise OSError(number, os.strerror(number))
        return real(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fails)
        with pytest.raises(StoreError) as raised:
            repair(run, tmp_path / "new.zarr")

    assert isinstance(raised.value, StoreFull) == (number == errno.ENOSPC)
    assert state(run) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run.zarr"]
    repaired(run)


def test_a_kill_leaves_no_run_and_the_next_repair_begins_again(run: Path, made: Made, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, pathlib\n"
        "from capd.store.repair import repair\n"
        "def kill(*_):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "repair.rename = kill\n"
        "repair.repair(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))\n"
    )
    new = tmp_path / "new.zarr"
    before = state(run)
    ended = subprocess.run([sys.executable, "-c", program, str(run), str(new)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert not new.exists()

    repair(run, new)

    assert state(run) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.zarr", "run.zarr"]
    is_whole(new, made[1])


def test_two_repairs_do_not_make_one_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = tmp_path / "new.zarr"
    real = repairs._writers
    said: list[str] = []

    def again(damaged: Path) -> Iterator[str]:
        monkeypatch.setattr(repairs, "_writers", real)
        with pytest.raises(StoreBusy, match="another repair") as busy:
            repair(run, new)
        said.append(str(busy.value))
        return real(damaged)  # type: ignore[return-value]

    monkeypatch.setattr(repairs, "_writers", again)

    assert repair(run, new).is_complete
    assert len(said) == 1


def test_no_file_of_the_damaged_run_is_opened_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even beside its catalog, which a kill left with a write-ahead log."""
    writer = Writer(tmp_path / "a")
    put_all(writer, 2)
    writer.flush()
    run = image(writer, tmp_path / "b")
    writer.close()
    before = state(run)
    events: list[tuple[str, str]] = []
    watching = True

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.link"):
            path, flags = str(arguments[0]), arguments[2] if event == "open" else os.O_WRONLY
            if path.startswith(str(run)) and int(flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):  # type: ignore[call-overload]
                events.append((event, path))

    sys.addaudithook(watch)
    try:
        done = repair(run, tmp_path / "new.zarr")
    finally:
        watching = False

    assert done.is_complete
    assert events == []
    assert state(run) == before
    is_whole(tmp_path / "new.zarr", writer.held)
