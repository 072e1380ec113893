"""A shard is sealed without the chunks that later ones replaced: same records, fewer bytes, exact sums."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capd
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.format.frames import FrameKind
from capd.store.run.run_store import RunStore
from capd.store.scan.scan import scan_shard
from capd.store.verify.run import verify_run
from tests.kit.store.damaging import frames
from tests.kit.store.writing import Writer, key

RNG = np.random.default_rng(7)
SMALL = key("small")
TWIN = key("twin")


def put(root: Path, sequence: int, count: int) -> Writer:
    """One more session of a run: records of two series, of which one is constant."""
    writer = Writer(root)
    writer.sequence = sequence
    for number in range(count):
        bits = RNG.standard_normal((200, 128)).astype("f4")
        writer.put(SMALL, "float32", bits, iteration=sequence + number)
        writer.put(TWIN, "float32", np.full((200, 128), 3, "f4"), iteration=sequence + number)
    writer.flush()
    return writer


def stored(run: Path) -> tuple[int, int]:
    """The stored bytes that the catalog counts for its series, and for their records."""
    with closing(sqlite3.connect(run / ".capd" / "node=n0" / CATALOG_NAME)) as db:
        (series,) = db.execute("SELECT SUM(stored_bytes) FROM series").fetchone()
        (records,) = db.execute("SELECT SUM(stored_nbytes) FROM records").fetchone()
    return series, records


def test_no_replaced_chunk_stays_in_a_sealed_shard(tmp_path: Path) -> None:
    held: list[np.ndarray] = []
    sizes = []
    for session in range(4):
        writer = put(tmp_path, 100 * session, 5)
        held += [bits for _, bits in writer.held[SMALL, "float32"]]
        writer.close()
        [path] = writer.run.glob("*/*/*/*/tensor.forward.small/data/c/0/0/0")
        sizes.append(path.stat().st_size)
        scanned = scan_shard(path)
        assert scanned is not None
        assert len(frames(path, FrameKind.CHUNK)) == len(scanned.index)
        assert scanned.replaced_nbytes == 0

    assert sizes[3] < 4.1 * sizes[0]
    run = writer.run
    [series] = capd.open(run).find(tensor_name="small", attempt="all")
    assert [series.numpy(n).tobytes() for n in range(20)] == [bits.tobytes() for bits in held]
    [twin] = capd.open(run).find(tensor_name="twin", attempt="all")
    assert all((twin.numpy(n) == 3).all() for n in range(20))
    assert verify_run(run).damaged == []
    series_nbytes, record_nbytes = stored(run)
    assert record_nbytes <= series_nbytes <= record_nbytes + 40
    # Everything in the two files but their headers and indexes.
    files = sum(path.stat().st_size for path in run.glob("*/*/*/*/*/data/c/0/0/0"))
    assert 0.97 * files < series_nbytes < files


def test_plain_readers_see_the_same_array(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    for session in range(3):
        writer = put(tmp_path, 100 * session, 5)
        writer.close()
    [data] = writer.run.glob("*/*/*/*/tensor.forward.small/data")
    array = zarr.open_array(data, mode="r")
    [series] = capd.open(writer.run).find(tensor_name="small", attempt="all")
    assert array.shape[0] == 15
    for number in range(15):
        assert array[number].tobytes() == series.numpy(number).tobytes()


def overtaken(data: Path, seal: Callable[[], None]) -> Any:
    """An array of a plain reader that asks for an index, and then for a chunk of it after `seal`."""
    pytest.importorskip("zarr")
    from zarr import open_array
    from zarr.abc.store import RangeByteRequest
    from zarr.storage import LocalStore

    seals = [seal]

    class Overtaken(LocalStore):
        async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
            if isinstance(byte_range, RangeByteRequest) and seals:
                seals.pop()()
            return await super().get(key, prototype, byte_range)

    return open_array(Overtaken(data), mode="r")


def test_readers_that_the_last_seal_overtakes_see_an_error_or_the_right_values(tmp_path: Path) -> None:
    put(tmp_path, 0, 5).close()
    run = tmp_path / "run.zarr"
    [series] = capd.open(run).find(tensor_name="small", attempt="all")
    want = [series.numpy(n).tobytes() for n in range(5)]
    [data] = run.glob("*/*/*/*/tensor.forward.small/data")
    [fresh] = capd.open(run).find(tensor_name="small", attempt="all")
    array = overtaken(data, lambda: put(tmp_path, 100, 3).close())
    with pytest.raises(ValueError, match="checksum"):
        array[3]
    assert [array[n].tobytes() for n in range(5)] == want
    # capd's own readers look again.
    assert [series.numpy(n).tobytes() for n in range(5)] == want
    assert [fresh.numpy(n).tobytes() for n in range(5)] == want


def test_readers_beside_a_capture_see_no_error_and_the_last_seal_makes_room(tmp_path: Path) -> None:
    put(tmp_path, 0, 5).close()
    run = tmp_path / "run.zarr"
    [series] = capd.open(run).find(tensor_name="small", attempt="all")
    want = [series.numpy(n).tobytes() for n in range(5)]
    [path] = run.glob("*/*/*/*/tensor.forward.small/data/c/0/0/0")
    writer = put(tmp_path, 100, 3)
    array = overtaken(path.parents[3], lambda: writer.pipeline.seal("run", is_last=False).result(timeout=30))
    assert array[3].tobytes() == want[3]
    assert replaced(path) > 0
    writer.put(SMALL, "float32", np.ones((200, 128), "f4"), iteration=200)
    writer.flush()
    writer.close()
    assert replaced(path) == 0
    assert verify_run(run).damaged == []


def replaced(path: Path) -> int:
    scanned = scan_shard(path)
    assert scanned is not None
    return scanned.replaced_nbytes


def test_few_replaced_bytes_are_not_worth_a_copy(tmp_path: Path) -> None:
    writer = put(tmp_path, 0, 201)  # twenty chunks, and one record in the last
    writer.close()
    writer = put(tmp_path, 1000, 1)
    writer.close()
    [path] = writer.run.glob("*/*/*/*/tensor.forward.small/data/c/0/0/0")
    scanned = scan_shard(path)
    assert scanned is not None
    assert 0 < scanned.replaced_nbytes < path.stat().st_size / 16
    assert verify_run(writer.run).damaged == []


def test_an_error_after_the_copy_leaves_everything_and_the_next_seal_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 0, 5).close()
    writer = put(tmp_path, 100, 5)
    from capd.store.disk import failpoints

    for name in ("compact.after_copy", "compact.before_delete"):
        monkeypatch.setitem(failpoints._active, name, ("error", 1))
        with pytest.raises(Exception, match="failpoint"):
            writer.pipeline.post("run", RunStore.seal).result(timeout=30)
        [series] = capd.open(writer.run).find(tensor_name="small", attempt="all")
        assert len({series.numpy(n).tobytes() for n in range(10)}) == 10
    writer.close()
    assert list(writer.run.glob(".capd/node=n0/spool/*")) == []
    assert verify_run(writer.run).damaged == []
    series_nbytes, record_nbytes = stored(writer.run)
    assert record_nbytes <= series_nbytes <= record_nbytes + 20
