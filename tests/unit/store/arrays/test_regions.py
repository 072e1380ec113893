"""Parts of records: the same elements that numpy would pick, from the chunks that hold them and no others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import capd
from capd.errors import CapdError, DamagedRecord
from capd.store.arrays.region import select
from capd.store.format.geometry import plan_geometry
from capd.store.read import parallel
from tests.kit.store.writing import Writer, key

RNG = np.random.default_rng(11)
LARGE = (3, 700, 2048)  # 17 MB of float32: 5.5 MiB per row of the first axis, two chunks each


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    """A sealed run with a large, a ragged, a small, a packed fp4 and a scalar series."""
    writer = Writer(tmp_path_factory.mktemp("regions"))
    for iteration in range(2):
        writer.put(key("large"), "float32", RNG.standard_normal(LARGE).astype("f4"), iteration=iteration)
        rows = 400 - 150 * iteration
        bits = RNG.integers(0, 1 << 16, (rows, 3000), dtype=np.uint16)
        writer.put(key("ragged"), "bfloat16", bits, iteration=iteration)
        writer.put(key("scalar"), "int64", np.array(7 + iteration), iteration=iteration)
    for iteration in range(600):
        writer.put(key("small"), "float32", RNG.standard_normal((32, 32)).astype("f4"), iteration=iteration)
        bits = RNG.integers(0, 256, (4, 6), dtype=np.uint8)
        writer.put(key("fp4"), "float4_e2m1fn_x2", bits, iteration=iteration)
    writer.close()
    assert not writer.outcomes.refusals
    return writer


def opened(run: Writer, name: str) -> tuple[capd.Series, list[np.ndarray]]:
    """The series of this tensor name, and what was put into it."""
    [series] = capd.open(run.run).find(tensor_name=name)
    return series, [bits for _, bits in run.held[series.key, series.dtype]]


REGIONS = [
    ...,
    (),
    0,
    -1,
    slice(1, 2),
    (slice(None), 3),
    (..., slice(0, 4)),
    (..., -1),
    (1, ..., slice(None, None, 5)),
    (slice(None, None, 2), slice(10, 690, 7), slice(-5, None)),
    (np.int64(2), slice(-3, -1), 5),
    (2, 699, 2047),
    (slice(5, 2), slice(None), 0),
]


@pytest.mark.parametrize("region", REGIONS, ids=repr)
def test_a_region_is_what_numpy_picks(run: Writer, region: Any) -> None:
    series, held = opened(run, "large")
    for i in (0, 1, -1):
        found, expected = series.numpy(i, region), held[i][region]
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes()
        assert found.flags.writeable
        assert found.flags.c_contiguous


@given(st.data())
def test_any_region_of_any_geometry_is_what_numpy_picks(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))
    chunk = tuple(data.draw(st.integers(1, n)) for n in shape)
    extents = tuple(-(-n // c) * c for n, c in zip(shape, chunk, strict=True))
    geometry = plan_geometry(extents or (), 1, 1 << 20)
    geometry = type(geometry)(extents, chunk, 1, 1, 1)
    parts = st.one_of(
        st.integers(-9, 8), st.slices(9).filter(lambda s: (s.step or 1) > 0), st.just(slice(None))
    )
    region = tuple(data.draw(st.lists(parts, max_size=len(shape))))
    if data.draw(st.booleans()):
        region = (*region[: len(region) // 2], ..., *region[len(region) // 2 :])
    record = np.arange(int(np.prod(shape)), dtype="i8").reshape(shape)
    padded = np.full(extents, -1, "i8")
    padded[tuple(slice(0, n) for n in shape)] = record
    try:
        expected = record[region]
    except IndexError:
        with pytest.raises(CapdError):
            select(region, shape)
        return

    selection = select(region, shape)
    out = np.full(selection.extents, -7, "i8")
    for piece in selection.pieces(geometry):
        at, ordinal = [], piece.ordinal
        for count, length in reversed(list(zip(geometry.grid, chunk, strict=True))):
            at.append(slice(ordinal % count * length, (ordinal % count + 1) * length))
            ordinal //= count
        block = padded[tuple(reversed(at))]
        assert not piece.whole or np.array_equal(block, block[piece.source])
        out[piece.target] = block[piece.source]
    assert out.reshape(selection.shape).tolist() == expected.tolist()


def test_ragged_small_and_scalar_records_have_regions_too(run: Writer) -> None:
    for name, region in {
        "ragged": (slice(100, None), slice(2990, None)),
        "small": (3, slice(1, None, 2)),
        "scalar": ...,
    }.items():
        series, held = opened(run, name)
        for i in (0, 1, len(held) - 1):
            assert series.numpy(i, region).tobytes() == held[i][region].tobytes()
            assert series.numpy(i, region).shape == held[i][region].shape


def test_values_of_a_region(run: Writer) -> None:
    series, held = opened(run, "ragged")
    part = (slice(0, 3), slice(None, 5))
    as_float = (held[1][part].astype("u4") << 16).view("f4")

    assert series.values(1, part).tobytes() == as_float.tobytes()
    packed, codes = opened(run, "fp4")
    assert packed.values(5, 0).shape == (12,)
    assert packed.numpy(5, 0).tobytes() == codes[5][0].tobytes()


@pytest.mark.parametrize(
    "region",
    [
        [0, 1],
        np.array([0]),
        None,
        (None, 0),
        True,
        1.5,
        "0",
        slice(None, None, -1),
        slice("a", None),
        (0, 0, 0, 0),
        (..., ...),
        3,
        -4,
        (0, 0, 2048),
        slice(None, None, 0),
    ],
    ids=repr,
)
def test_what_is_no_region_is_refused_in_one_line(run: Writer, region: Any) -> None:
    series, _ = opened(run, "large")

    with pytest.raises(CapdError) as caught:
        series.numpy(0, region)
    assert "\n" not in str(caught.value)


def test_only_the_chunks_that_are_touched_are_read(run: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    series, held = opened(run, "large")
    series.numpy(0)
    read: list[int] = []
    real = os.pread

    def pread(fd: int, nbytes: int, offset: int) -> bytes:
        read.append(nbytes)
        return real(fd, nbytes, offset)

    monkeypatch.setattr(os, "pread", pread)
    assert series.numpy(0, (1, slice(0, 2))).tobytes() == held[0][1, :2].tobytes()
    one = sum(read)
    read.clear()
    series.numpy(0)

    assert 0 < one < sum(read) / 5  # one chunk of six


def test_small_records_that_share_a_chunk_have_it_decoded_once(
    run: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import capd.store.read.elements as records

    series, held = opened(run, "small")
    decoded: list[int] = []
    real = records.decode_into

    def decode_into(chain: Any, payload: bytes, out: np.ndarray) -> None:
        decoded.append(len(payload))
        real(chain, payload, out)

    monkeypatch.setattr(records, "decode_into", decode_into)
    order = RNG.permutation(len(held))
    assert all(series.numpy(i).tobytes() == held[i].tobytes() for i in order.tolist())
    assert len(decoded) == 3  # 600 records of 4 KiB in chunks of 1 MiB


def test_a_result_is_the_callers_alone(run: Writer) -> None:
    series, held = opened(run, "small")
    series.numpy(3)[...] = 0
    assert series.numpy(3).tobytes() == held[3].tobytes()


def test_stack_is_numpys_stack(run: Writer) -> None:
    small, held = opened(run, "small")
    large, tensors = opened(run, "large")
    ragged, _ = opened(run, "ragged")

    assert small.stack().tobytes() == np.stack(held).tobytes()
    assert small.stack(slice(250, 270, 3), (0,)).tobytes() == np.stack(held[250:270:3])[:, 0].tobytes()
    assert large.stack(slice(None), (slice(1, None), 5)).tobytes() == np.stack(tensors)[:, 1:, 5].tobytes()
    assert large.stack().shape == (2, *LARGE)
    with pytest.raises(CapdError, match=r"\[250, 3000\] and \[400, 3000\]"):
        ragged.stack()
    with pytest.raises(CapdError, match="no record"):
        small.stack(slice(0, 0))


def test_records_are_a_sequence(run: Writer) -> None:
    series, held = opened(run, "small")
    records = series.records

    assert len(records) == len(held) == 600
    assert [record.iteration for record in records] == list(range(600))
    assert [records[0].iteration, records[-1].iteration, records[599].iteration] == [0, 599, 599]
    assert [record.iteration for record in records[-3:]] == [597, 598, 599]
    for wrong in (600, -601):
        with pytest.raises(IndexError):
            records[wrong]
        with pytest.raises(IndexError):
            series.numpy(wrong)


def test_one_record_of_many_costs_a_window_of_rows(run: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    import capd.store.read.node as node

    fetched: list[int] = []

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            for item in real(*arguments):
                fetched.append(item[0])
                yield item

        return count

    monkeypatch.setattr(node, "read_records", counted(node.read_records))
    monkeypatch.setattr(node, "read_heads", counted(node.read_heads))
    monkeypatch.setattr("capd.store.read.rows._WINDOW", 64)
    series, held = opened(run, "small")
    assert not fetched
    assert series.numpy(321).tobytes() == held[321].tobytes()
    assert sorted(fetched) == list(range(320, 384))
    fetched.clear()
    assert series.records[100].iteration == 100
    assert sorted(fetched) == list(range(64, 128))


def test_records_without_elements_are_vouched_for_as_well(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    shapes = [(4, 8), (0, 8), (0, 3), (2, 0)]
    for iteration, shape in enumerate(shapes):
        writer.put(key("experts"), "float32", np.zeros(shape, "f4"), iteration=iteration)
    writer.flush()
    live = capd.open(writer.run)
    writer.close()

    for store in (live, capd.open(writer.run)):
        [series] = store.series
        assert [series.numpy(i).shape for i in range(4)] == shapes


def test_files_are_closed_with_the_store_and_threads_end_with_the_read(
    run: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: set[str] = set()
    real = os.pread

    def pread(fd: int, nbytes: int, offset: int) -> bytes:
        names.add(threading.current_thread().name)
        return real(fd, nbytes, offset)

    def held() -> int:
        links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return sum(link.startswith(str(run.run)) for link in links)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(parallel, "_free", threading.Semaphore(3))
    series, _ = opened(run, "large")
    series.numpy(0, (0, 0))
    assert names == {threading.current_thread().name}  # one chunk, no other thread
    series.numpy(0)
    assert "capd-read" in names
    assert not any(thread.name == "capd-read" for thread in threading.enumerate())
    assert held() == 1
    del series
    assert not held()  # without waiting for a garbage collection


def test_an_error_on_another_thread_is_raised_and_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Semaphore(2)
    monkeypatch.setattr(parallel, "_free", free)
    done: list[int] = []
    meet = threading.Barrier(3)

    def job(number: int) -> None:
        meet.wait(10)
        if number == 2:
            raise DamagedRecord("number 2")
        done.append(number)

    with pytest.raises(DamagedRecord, match="number 2"):
        parallel.run_jobs([lambda n=n: job(n) for n in range(3)])
    assert sorted(done) == [0, 1]
    assert all(free.acquire(blocking=False) for _ in range(2))
    parallel.run_jobs([lambda n=n: done.append(n) for n in range(5)])  # no helper is free: all on this thread
    assert sorted(done) == [0, 0, 1, 1, 2, 3, 4]


def test_a_forked_child_reads_with_threads_of_its_own(run: Writer) -> None:
    series, held = opened(run, "large")
    series.numpy(0)
    pid = os.fork()
    if pid == 0:
        good = all(series.numpy(i).tobytes() == held[i].tobytes() for i in range(2))
        os._exit(0 if good else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.slow
def test_many_threads_read_one_store(run: Writer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    store = capd.open(run.run)
    held = {(s.key, i): bits for s in store.series for i, (_, bits) in enumerate(run.held[s.key, s.dtype])}

    def check(seed: int) -> bool:
        chosen = np.random.default_rng(seed)
        for _ in range(40):
            series = store.series[int(chosen.integers(len(store.series)))]
            i = int(chosen.integers(len(series)))
            if series.numpy(i).tobytes() != held[series.key, i].tobytes():
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(check, range(4)))


def test_dask_has_one_block_per_shard(tmp_path: Path) -> None:
    import dask

    writer = Writer(tmp_path, shard_nbytes=4 << 20)
    for iteration in range(10):
        writer.put(key("x"), "float32", RNG.standard_normal((512, 512)).astype("f4"), iteration=iteration)
    writer.flush()
    writer.pipeline.post("run", lambda store: store.maintain()).result(timeout=30)  # full shards are sealed
    [live] = capd.open(writer.run).series
    assert len(live) == 10
    assert live.dask().chunks == ((4, 4, 2), (512,), (512,))  # the last two are not sealed
    writer.close()
    [series] = capd.open(writer.run).series
    array = series.dask()

    assert array.chunks == ((4, 4, 2), (512,), (512,))
    with dask.config.set(scheduler="threads"):
        assert array.compute().tobytes() == series.stack().tobytes()
        total = (array.view("u4") ^ np.uint32(1)).compute()
    assert total.tobytes() == (series.stack().view("u4") ^ np.uint32(1)).tobytes()


def test_a_region_of_a_damaged_record_is_an_error_only_where_it_is_damaged(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    bits = RNG.standard_normal((4, 1024, 1024)).astype("f4")
    writer.put(key("x", module="m"), "float32", bits)
    writer.close()
    [series] = capd.open(writer.run).series
    shard = writer.run / series.path / "data" / "c" / "0" / "0" / "0" / "0"
    content = bytearray(shard.read_bytes())
    content[len(content) // 8] ^= 4  # in the first of four chunks
    shard.write_bytes(content)

    assert series.numpy(0, slice(1, None)).tobytes() == bits[1:].tobytes()
    for read in (lambda: series.numpy(0, 0), lambda: series.numpy(0), lambda: series.stack()):
        with pytest.raises(DamagedRecord, match=r"m\.forward\.x#0 in .*c/0/0/0/0: .*checksum"):
            read()
