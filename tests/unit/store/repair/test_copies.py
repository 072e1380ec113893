"""Copies in the spool are taken for what they are: no other series', no other node's, and none that cannot be read."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest

import capd
from capd.errors import DamagedRecord
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.format.frames import FrameKind
from capd.store.recover import damaged_files
from capd.store.repair.repair import repair
from capd.store.run.options import open_files_within
from capd.store.run.run_store import RunStore
from capd.store.verify.run import verify_run
from tests.kit.store.damaging import flip, frames, image, inside, spool
from tests.kit.store.repairing import lost, repaired
from tests.kit.store.writing import Writer, key

RNG = np.random.default_rng(23)
OPTIONS = {"shard_nbytes": 2 << 20}  # four records in a shard


def put(writer: Writer, name: str, *iterations: int) -> None:
    for iteration in iterations:
        bits = RNG.standard_normal((300, 400)).astype("f4")
        writer.put(key(name), "float32", bits, iteration=iteration)
    writer.flush()


def shard(run: Path, name: str, number: int) -> Path:
    [path] = run.glob(f"*/rank0/layer0/pre/tensor.forward.{name}/data/c/{number}/0/0")
    return path


def damage(path: Path, kind: FrameKind, number: int) -> None:
    flip(path, inside(frames(path, kind)[number]))


def lose_names(run: Path, *names: str) -> None:
    """The catalog, and the published columns of these series."""
    for path in (run / ".capd" / "node=n0").glob(f"{CATALOG_NAME}*"):
        path.unlink()
    for name in names:
        [document] = run.glob(f"*/rank0/layer0/pre/tensor.forward.{name}/zarr.json")
        document.write_bytes(b"")


def iterations(run: Path, writer: Writer, name: str) -> list[int]:
    """Of the records of a series, each of which has the elements captured then."""
    held = {m.iteration: bits for m, bits in writer.held[key(name), "float32"]}
    [series] = capd.open(run).find(tensor_name=name)
    found = []
    for number in range(len(series)):
        with contextlib.suppress(DamagedRecord):
            bits, iteration = series.numpy(number), series.records[number].iteration
            assert np.array_equal(bits, held[iteration])
            found.append(iteration)
    return found


def test_records_without_a_name_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """Two series have a record each that lost its COMMIT once, and is in the copy that an open shard goes on from."""
    writer = Writer(tmp_path / "a", **OPTIONS)
    for name in ("one", "other"):
        put(writer, name, *range(6))
    writer.pipeline.seal("run").result(timeout=30)
    run = image(writer, tmp_path / "b")
    writer.close()
    for name in ("one", "other"):
        damage(shard(run, name, 1), FrameKind.COMMIT, 0)
    lose_names(run)
    again = Writer(run.parent, **OPTIONS)
    again.sequence, again.held = writer.sequence, writer.held
    for name in ("one", "other"):
        put(again, name, 10)
    run = image(again, tmp_path / "c")
    again.close()
    for name in ("one", "other"):
        damage(shard(run, name, 0), FrameKind.COMMIT, 1)
    damage(shard(run, "other", 1), FrameKind.CHUNK, 0)
    lose_names(run, "one", "other")

    Writer(run.parent, **OPTIONS).close()

    done, new = repaired(run)
    assert lost(done) == {"one": [1, 4], "other": [1, 4]}
    for place in (run, new):
        assert iterations(place, again, "one") == iterations(place, again, "other") == [0, 2, 3, 5, 10]


def one_sealed_one_open(root: Path) -> tuple[Path, Writer]:
    """A series with a full, sealed shard of four records and an open one of two."""
    writer = Writer(root / "a", **OPTIONS)
    put(writer, "one", *range(6))
    writer.pipeline.post("run", RunStore.maintain).result(timeout=30)
    run = image(writer, root / "b")
    writer.close()
    return run, writer


@pytest.mark.parametrize("who", ["daemon", "repair"])
def test_an_open_shard_with_a_sector_that_cannot_be_read_costs_what_stands_there(
    tmp_path: Path, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, writer = one_sealed_one_open(tmp_path)
    bad = spool(run, "*.partial")
    inode, at = bad.stat().st_ino, inside(frames(bad, FrameKind.CHUNK)[-1])
    if who == "daemon":
        damage(shard(run, "one", 0), FrameKind.COMMIT, 1)
        lose_names(run, "one")
    real = os.pread

    def pread(fd: int, nbytes: int, offset: int) -> bytes:
        if offset <= at < offset + nbytes and os.fstat(fd).st_ino == inode:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, nbytes, offset)

    monkeypatch.setattr(damaged_files, "is_the_files_fault", lambda *_: True)
    monkeypatch.setattr("capd.store.recover.partials.is_the_files_fault", lambda *_: True)
    monkeypatch.setattr(os, "pread", pread)

    if who == "repair":
        new = tmp_path / "new.zarr"
        assert lost(repair(run, new)) == {"one": [5]}
        assert iterations(new, writer, "one") == [0, 1, 2, 3, 4]
        assert verify_run(new).ok
    else:
        Writer(run.parent, **OPTIONS).close()
        assert iterations(run, writer, "one") == [0, 2, 3]  # the file is in the quarantine


@pytest.mark.parametrize(
    ("limit", "kept_open"), [(resource.RLIM_INFINITY, 512), (1 << 20, 512), (256, 128), (4, 8)]
)
def test_shards_are_kept_open_within_half_of_the_limit(limit: int, kept_open: int) -> None:
    assert open_files_within(limit) == kept_open


def test_series_of_two_nodes_at_one_place_stay_apart(tmp_path: Path) -> None:
    """What this node held of a series is left from before somebody removed it, and another node made it anew."""
    writer = Writer(tmp_path / "a", **OPTIONS)
    put(writer, "one", 0, 1)
    run = image(writer, tmp_path / "b")
    writer.close()
    other = Writer(tmp_path / "c", node="n1", **OPTIONS)
    put(other, "one", 10, 11)
    other.close()
    (run / ".capd" / "node=n0").rename(other.run / ".capd" / "node=n0")
    (other.run / ".capd" / "node=n0" / CATALOG_NAME).unlink()

    done, new = repaired(other.run)

    assert done.is_complete
    assert [[r.iteration for r in series.records] for series in capd.open(new).series] == [[0, 1], [10, 11]]
