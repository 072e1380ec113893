"""After any end of the writer: everything committed is there once, and writing goes on."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capd
from capd.errors import StoreError
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.catalog.writer import Catalog
from capd.store.disk.layout import partial_path
from capd.store.format.frames import FRAME_NBYTES, Frame, FrameKind
from capd.store.scan.scan import scan_shard
from capd.store.verify.run import verify_run
from tests.kit.store.damaging import (
    edit_catalog,
    flip,
    frames,
    head,
    image,
    inside,
    quarantined,
    spool,
    without,
)
from tests.kit.store.reading import Held, assert_capd_reads, assert_zarr_readers_read
from tests.kit.store.writing import CLIENT, Writer, key
from tests.kit.tiers import rows

RNG = np.random.default_rng(3)


def put_some(writer: Writer, first: int, count: int) -> None:
    for iteration in range(first, first + count):
        writer.put(key("large"), "float32", RNG.standard_normal((300, 400)).astype("f4"), iteration=iteration)
        for call in range(40):
            bits = RNG.standard_normal((100, 8)).astype("f4")
            writer.put(key("small"), "float32", bits, iteration=iteration, call=call)


@pytest.mark.parametrize("catalog", rows(["kept", "lost", "damaged"], ["lost"]))
def test_a_killed_writer_loses_nothing_it_committed(tmp_path: Path, catalog: str) -> None:
    first = Writer(tmp_path / "a", shard_nbytes=1 << 20)
    put_some(first, 0, 5)
    first.flush()
    root = image(first, tmp_path / "b").parent
    first.close()
    node = root / "run.zarr" / ".capd" / "node=n0"
    if catalog == "lost":
        for path in node.glob(f"{CATALOG_NAME}*"):
            path.unlink()
    elif catalog == "damaged":
        (node / CATALOG_NAME).write_bytes(b"\xff" * 20_000)
        for suffix in ("-wal", "-shm"):
            (node / (CATALOG_NAME + suffix)).unlink(missing_ok=True)
    if catalog == "kept":
        assert_capd_reads(root / "run.zarr", first.held)  # without a daemon, before any recovery

    second = Writer(root, shard_nbytes=1 << 20)

    assert second.pipeline.committed("run", CLIENT) == [(1, first.sequence)]
    second.sequence, second.held = first.sequence, first.held
    put_some(second, 5, 3)
    second.close()
    assert_capd_reads(second.run, second.held)
    assert_zarr_readers_read(second.run, second.held)
    assert not list((node / "spool").iterdir())


def test_a_torn_tail_costs_only_the_record_that_was_being_written(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    put_some(writer, 0, 3)
    writer.flush()
    root = image(writer, tmp_path / "b").parent
    writer.close()
    spool = root / "run.zarr" / ".capd" / "node=n0" / "spool"
    for path in [*spool.glob("*.partial"), *spool.glob("*.log")]:
        with path.open("ab") as file:
            file.write(b"CPDF" + os.urandom(100))

    again = Writer(root)
    again.close()

    assert_capd_reads(again.run, writer.held)
    assert_zarr_readers_read(again.run, writer.held)


def test_a_cut_tail_gives_a_prefix_never_half_a_record(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    for iteration in range(4):
        writer.put(key("large"), "float32", RNG.standard_normal((300, 400)).astype("f4"), iteration=iteration)
    writer.flush()
    held = writer.held[(key("large"), "float32")]
    for cut in (1, 1000, 200_000, 700_000, 5_000_000):
        root = image(writer, tmp_path / f"cut{cut}").parent
        [partial] = (root / "run.zarr" / ".capd" / "node=n0" / "spool").glob("*.partial")
        os.truncate(partial, max(0, partial.stat().st_size - cut))
        for path in partial.parent.parent.glob(f"{CATALOG_NAME}*"):
            path.unlink()
        Writer(root).close()
        series = capd.open(root / "run.zarr").series
        kept = [s.numpy(i) for s in series for i in range(len(s))]
        assert len(kept) < 4
        assert all(np.array_equal(bits, held[i][1]) for i, bits in enumerate(kept))
    writer.close()


@pytest.mark.parametrize("step", rows(["index", "rename", "columns"], ["rename"]))
def test_an_interrupted_seal_is_finished(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seal stops right after one of its steps; the files are taken as they stand."""
    writer = Writer(tmp_path / "a")
    put_some(writer, 0, 3)
    writer.flush()

    def stop(*_: object) -> None:
        raise OSError(5, "stopped here")

    target = {
        "index": "capd.store.shards.seal.make_directory",
        "rename": "capd.store.run.run_store.publish",
        "columns": "capd.store.disk.layout.Layout.publish",
    }[step]
    monkeypatch.setattr(target, stop)
    with pytest.raises(OSError, match="stopped here"):
        writer.pipeline.seal("run").result(timeout=30)
    root = image(writer, tmp_path / "b").parent
    assert_capd_reads(root / "run.zarr", writer.held)
    monkeypatch.undo()

    Writer(root).close()
    writer.close()  # the same process may also try again

    for run in (root / "run.zarr", writer.run):
        assert_capd_reads(run, writer.held)
        assert_zarr_readers_read(run, writer.held)


def test_full_disk_refuses_the_record_and_keeps_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import capd.store.shards.writer as shards

    writer = Writer(tmp_path)
    put_some(writer, 0, 2)
    writer.flush()
    real = shards.pwrite_all

    def short(fd: int, parts: list[bytes], offset: int) -> int:
        real(fd, [memoryview(b"".join(parts))[:1000]], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "pwrite_all", short)
    lost = writer.put(key("large"), "float32", np.ones((300, 400), "f4"), iteration=99)
    writer.flush()
    monkeypatch.undo()
    writer.held[(key("large"), "float32")].pop()
    put_some(writer, 2, 2)
    writer.close()

    assert [(s, r.value) for s, r, _ in writer.outcomes.refusals] == [(lost, "disk_full")]
    assert_capd_reads(writer.run, writer.held)
    assert_zarr_readers_read(writer.run, writer.held)


def test_sessions_and_series_totals_survive_in_the_catalog(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    put_some(writer, 0, 2)
    writer.flush()
    writer.close()

    catalog = Catalog(writer.run / ".capd" / "node=n0" / CATALOG_NAME)
    rows = {row.header.key.tensor_name: row for row in catalog.series()}
    catalog.close()

    assert (rows["large"].records, rows["large"].sealed) == (2, 2)
    assert rows["small"].raw_bytes == 80 * 100 * 8 * 4


# -- damage in the spool: what it touched is lost, everything else is there, and numbers stay dense -----------------


def spooled(tmp_path: Path, **options: int) -> tuple[Writer, Path]:
    """A run as a kill leaves it: five large records in a `.partial`, sixty small ones of two series in a log."""
    writer = Writer(tmp_path / "a", **options)
    for iteration in range(5):
        writer.put(key("large"), "float32", RNG.standard_normal((300, 400)).astype("f4"), iteration=iteration)
        for call in range(6):
            for name in ("small", "tiny"):
                bits = RNG.standard_normal((30, 8)).astype("f4")
                writer.put(key(name), "float32", bits, iteration=iteration, call=call)
        writer.flush()  # a log ends between two writes, and what waits together is one write
    writer.pipeline.post("run", lambda store: store.flush_catalog()).result(timeout=30)
    run = image(writer, tmp_path / "b")
    writer.close()
    return writer, run


def reopened(run: Path, held: Held) -> None:
    """A daemon recovers the run and seals it: exactly `held` is there, for capd and for plain Zarr readers."""
    again = Writer(run.parent)
    again.sequence = 10_000
    again.held = {identity: list(records) for identity, records in held.items()}
    again.put(key("large"), "float32", np.ones((300, 400), "f4"), iteration=90)
    again.put(key("small"), "float32", np.ones((30, 8), "f4"), iteration=90)
    again.close()
    assert_capd_reads(run, again.held)
    assert_zarr_readers_read(run, again.held)
    assert [str(damage) for damage in verify_run(run).damaged] == []


@pytest.mark.parametrize("catalog", rows(["kept", "lost"], ["kept"]))
@pytest.mark.parametrize("where", [head, inside])
def test_a_lost_commit_inside_a_partial_costs_that_record_alone(
    tmp_path: Path, where: Callable[[Frame], int], catalog: str
) -> None:
    writer, run = spooled(tmp_path)
    partial = spool(run, "*.partial")
    flip(partial, where(frames(partial, FrameKind.COMMIT)[2]))
    if catalog == "lost":
        (run / ".capd" / "node=n0" / CATALOG_NAME).unlink()

    reopened(run, without(writer.held, lambda name, m: name == "large" and m.iteration == 2))

    assert partial.name in quarantined(run)


def test_a_damaged_header_of_a_chunk_costs_nothing(tmp_path: Path) -> None:
    writer, run = spooled(tmp_path)
    partial = spool(run, "*.partial")
    flip(partial, head(frames(partial, FrameKind.CHUNK)[2]))

    reopened(run, writer.held)


def test_a_partial_whose_header_is_damaged_is_known_by_its_name(tmp_path: Path) -> None:
    writer, run = spooled(tmp_path)
    partial = spool(run, "*.partial")
    flip(partial, inside(frames(partial, FrameKind.HEADER)[0]))

    reopened(run, writer.held)


@pytest.mark.parametrize("where", [head, inside])
@pytest.mark.parametrize("kind", [FrameKind.RECORD, FrameKind.COMMIT])
def test_damage_in_a_log_costs_the_record_that_it_touched(
    tmp_path: Path, kind: FrameKind, where: Callable[[Frame], int]
) -> None:
    writer, run = spooled(tmp_path)
    log = spool(run, "small-*.log")
    touched = frames(log, kind)[20]  # of the second iteration: small, tiny, small, tiny, …
    [lost] = [records[10] for (k, _), records in writer.held.items() if k.tensor_name == "small"]
    flip(log, where(touched))

    reopened(run, without(writer.held, lambda name, m: name == "small" and m == lost[0]))

    assert log.name in quarantined(run)


def test_a_lost_series_frame_of_a_log_costs_nothing_that_the_catalog_knows(tmp_path: Path) -> None:
    writer, run = spooled(tmp_path)
    log = spool(run, "small-*.log")
    for frame in frames(log, FrameKind.SERIES):
        flip(log, inside(frame))

    reopened(run, writer.held)


def test_a_log_whose_header_is_damaged_is_read(tmp_path: Path) -> None:
    writer, run = spooled(tmp_path)
    log = spool(run, "small-*.log")
    flip(log, inside(frames(log, FrameKind.HEADER)[0]))

    reopened(run, writer.held)


def test_small_records_that_closed_ranks_are_not_taken_twice_after_the_next_kill(tmp_path: Path) -> None:
    """A log that was written anew has the numbers that its records got: sealed ones are known by them."""
    writer, run = spooled(tmp_path, log_nbytes=20_000)
    logs = sorted((run / ".capd" / "node=n0" / "spool").glob("small-*.log"))
    assert len(logs) > 2
    flip(logs[0], inside(frames(logs[0], FrameKind.RECORD)[0]))
    again = Writer(run.parent)
    mended = {log.name: log.read_bytes() for log in logs}
    again.pipeline.seal("run").result(timeout=30)
    killed = image(again, tmp_path / "c")
    again.close()
    for name, content in mended.items():  # the kill came before they were deleted
        (killed / ".capd" / "node=n0" / "spool" / name).write_bytes(content)

    first = writer.held[(key("small"), "float32")][0][0]
    reopened(killed, without(writer.held, lambda name, m: name == "small" and m == first))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _garbage(path: Path) -> None:
    path.write_bytes(RNG.bytes(5000))


def _directory(path: Path) -> None:
    path.mkdir()


def _link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


@pytest.mark.parametrize("junk", [_empty, _garbage, _directory, _link])
@pytest.mark.parametrize(
    "name", ["0123456789abcdef0123-00000000.partial", "small-00000007.log", "small-x.log"]
)
def test_what_cannot_be_read_is_set_aside_and_the_run_opens(
    tmp_path: Path, junk: Callable[[Path], None], name: str
) -> None:
    writer, run = spooled(tmp_path)
    junk(run / ".capd" / "node=n0" / "spool" / name)

    reopened(run, writer.held)

    assert name in quarantined(run)


@pytest.mark.parametrize("difference", [{"run_id": "other"}, {"node": "n1"}])
def test_files_of_another_run_or_node_are_set_aside(tmp_path: Path, difference: dict[str, str]) -> None:
    stranger = Writer(tmp_path / "s", **difference)
    stranger.put(key("large"), "float32", np.zeros((300, 400), "f4"))
    stranger.put(key("small"), "float32", np.zeros((30, 8), "f4"))
    stranger.flush()
    [partial] = stranger.run.rglob("*.partial")
    [log] = stranger.run.rglob("small-*.log")
    writer, run = spooled(tmp_path)
    shutil.copy(partial, spool(run, "*.partial"))
    shutil.copy(log, spool(run, "small-*.log").with_name("small-00000009.log"))
    stranger.close()

    reopened(run, without(writer.held, lambda name, m: name == "large"))

    assert {partial.name, "small-00000009.log"} <= set(quarantined(run))


def test_frames_that_were_appended_twice_or_from_elsewhere_do_not_count(tmp_path: Path) -> None:
    writer, run = spooled(tmp_path)
    partial = spool(run, "*.partial")
    whole = partial.read_bytes()
    last = frames(partial, FrameKind.COMMIT)[-1]
    partial.write_bytes(whole + whole[last.offset - FRAME_NBYTES :] + whole)

    reopened(run, writer.held)


def test_a_torn_copy_of_a_sealed_shard_does_not_stand_in_for_it(tmp_path: Path) -> None:
    """A loss of power behind a seal: the copy for the next record is half there, the mark of the seal is not."""
    writer = Writer(tmp_path)
    for iteration in range(3):
        writer.put(key("large"), "float32", RNG.standard_normal((300, 256)).astype("f4"), iteration=iteration)
    writer.close()
    [shard] = (path for path in writer.run.glob("bf16/**/data/c/**/*") if path.is_file())
    scanned = scan_shard(shard)
    assert scanned is not None
    path = str(shard.relative_to(writer.run)).partition("/data/")[0]
    partial = partial_path(writer.run / ".capd" / "node=n0" / "spool", path, 0)
    partial.write_bytes(shard.read_bytes()[: scanned.runs[1].end] + bytes(5000))
    edit_catalog(partial.parents[1] / CATALOG_NAME, "UPDATE series SET sealing=1, sealed=1")

    again = Writer(tmp_path)

    assert again.pipeline.committed("run", CLIENT) == [(1, 3)]
    assert not partial.exists()
    again.sequence, again.held = writer.sequence, writer.held
    again.put(key("large"), "float32", RNG.standard_normal((300, 256)).astype("f4"), iteration=3)
    again.close()
    assert verify_run(again.run).ok
    assert_capd_reads(again.run, again.held)
    assert_zarr_readers_read(again.run, again.held)


def test_a_partial_that_continues_a_sealed_shard_falls_back_on_it(tmp_path: Path) -> None:
    """Damage to the copied part costs nothing: the sealed shard still has it."""
    writer = Writer(tmp_path / "a")
    for iteration in range(3):
        writer.put(key("large"), "float32", RNG.standard_normal((300, 400)).astype("f4"), iteration=iteration)
    writer.flush()
    writer.pipeline.seal("run").result(timeout=30)
    for iteration in (3, 4, 5):
        writer.put(key("large"), "float32", RNG.standard_normal((300, 400)).astype("f4"), iteration=iteration)
    writer.flush()
    run = image(writer, tmp_path / "b")
    writer.close()
    partial = spool(run, "*.partial")
    commits = frames(partial, FrameKind.COMMIT)
    flip(partial, inside(commits[0]))
    flip(partial, inside(commits[4]))

    reopened(run, without(writer.held, lambda name, m: m.iteration == 4))


@pytest.mark.parametrize("sealed", rows([0, 3], [3]))
def test_a_partial_that_lost_its_only_new_commit_is_kept_in_the_quarantine(
    tmp_path: Path, sealed: int
) -> None:
    writer = Writer(tmp_path / "a")
    for iteration in range(sealed + 1):
        if iteration == sealed:
            writer.pipeline.seal("run").result(timeout=30)
        writer.put(key("large"), "float32", RNG.standard_normal((300, 400)).astype("f4"), iteration=iteration)
        writer.flush()
    writer.pipeline.post("run", lambda store: store.flush_catalog()).result(timeout=30)
    run = image(writer, tmp_path / "b")
    writer.close()
    partial = spool(run, "*.partial")
    flip(partial, inside(frames(partial, FrameKind.COMMIT)[-1]))
    damaged = partial.read_bytes()

    reopened(run, without(writer.held, lambda name, m: m.iteration == sealed))

    assert (run / ".capd" / "node=n0" / "quarantine" / partial.name).read_bytes() == damaged


@pytest.mark.parametrize(
    "step",
    [
        "capd.store.recover.damaged_files.copy_aside",
        "capd.store.recover.damaged_files.rename",
        "capd.store.recover.damaged_files.sync_paths",
    ],
)
def test_mending_that_is_interrupted_begins_again(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, run = spooled(tmp_path)
    partial, log = spool(run, "*.partial"), spool(run, "small-*.log")
    flip(partial, inside(frames(partial, FrameKind.COMMIT)[2]))
    flip(log, inside(frames(log, FrameKind.RECORD)[20]))
    lost = writer.held[(key("small"), "float32")][10][0]
    module, _, function = step.rpartition(".")
    for number in range(1, 10):
        calls = iter(range(100))
        real = getattr(sys.modules[module], function)

        def stop(*arguments: object, number: int = number, calls: Any = calls, real: Any = real) -> object:
            if next(calls) == number - 1:
                raise OSError(28, "stopped here")
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(step, stop)
            try:
                Writer(run.parent).close()
                break
            except StoreError:
                continue
    else:
        pytest.fail("recovery never came to an end")

    held = without(writer.held, lambda name, m: name == "large" and m.iteration == 2)
    held[(key("small"), "float32")] = [r for r in held[(key("small"), "float32")] if r[0] != lost]
    reopened(run, held)


def test_a_start_with_a_complete_catalog_does_not_read_sealed_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path)
    put_some(writer, 0, 3)
    writer.close()
    read: list[Path] = []
    for module in ("capd.store.recover.partials", "capd.store.scan.survey"):
        monkeypatch.setattr(f"{module}.scan_shard", lambda path, *_: read.append(path))

    Writer(tmp_path).close()

    assert read == []
