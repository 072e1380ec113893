"""After any end of the writer: everything committed is there once, and writing goes on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import capd
from capd.store.catalog import Catalog
from capd.store.catalog_read import CATALOG_NAME
from tests.unit.store.reading import assert_capd_reads, assert_zarr_readers_read
from tests.unit.store.writing import CLIENT, Writer, key

RNG = np.random.default_rng(3)


def put_some(writer: Writer, first: int, count: int) -> None:
    for iteration in range(first, first + count):
        writer.put(key("large"), "float32", RNG.standard_normal((300, 400)).astype("f4"), iteration=iteration)
        for call in range(40):
            bits = RNG.standard_normal((100, 8)).astype("f4")
            writer.put(key("small"), "float32", bits, iteration=iteration, call=call)


def crash_image(writer: Writer, target: Path) -> Path:
    """The files as a kill at this moment would leave them: everything written, nothing drained or sealed."""
    shutil.copytree(writer.run, target / writer.run.name)
    return target


@pytest.mark.parametrize("catalog", ["kept", "lost", "damaged"])
def test_a_killed_writer_loses_nothing_it_committed(tmp_path: Path, catalog: str) -> None:
    first = Writer(tmp_path / "a", shard_nbytes=1 << 20)
    put_some(first, 0, 5)
    first.flush()
    root = crash_image(first, tmp_path / "b")
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
    root = crash_image(writer, tmp_path / "b")
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
        root = crash_image(writer, tmp_path / f"cut{cut}")
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


@pytest.mark.parametrize("step", ["index", "rename", "columns"])
def test_an_interrupted_seal_is_finished(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seal stops right after one of its steps; the files are taken as they stand."""
    writer = Writer(tmp_path / "a")
    put_some(writer, 0, 3)
    writer.flush()

    def stop(*_: object) -> None:
        raise OSError(5, "stopped here")

    target = {
        "index": "capd.store.seal.make_directory",
        "rename": "capd.store.run.publish",
        "columns": "capd.store.layout.Layout.publish_shapes",
    }[step]
    monkeypatch.setattr(target, stop)
    with pytest.raises(OSError, match="stopped here"):
        writer.pipeline.seal("run").result(timeout=30)
    root = crash_image(writer, tmp_path / "b")
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
    import capd.store.shards as shards

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
