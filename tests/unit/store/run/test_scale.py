"""Large numbers: of records, of series, of variants, of bytes per record; read by capd, zarr and tensorstore."""

from __future__ import annotations

import contextlib
import os
import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr

import capd
from capd.errors import StoreError
from capd.store.format.encode import ChunkResult
from capd.store.format.frames import RecordRow
from capd.store.run.options import StoreOptions
from capd.store.run.run_store import RunStore
from capd.store.shards.series import Plan
from capd_client.protocol.key import Moment
from tests.kit.store.reading import assert_capd_reads, assert_zarr_readers_read, published_rows
from tests.kit.store.writing import CLIENT, Writer, key

RNG = np.random.default_rng(23)
PATIENCE_S = 400


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """100 more open files than now, and not one beyond."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def with_tensorstore(array: Path) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(array)}}
    return np.asarray(tensorstore.open(spec).result().read().result())


@pytest.mark.fault
@pytest.mark.timeout(PATIENCE_S)
def test_a_hundred_thousand_records_in_one_series(tmp_path: Path) -> None:
    count = 100_000
    values = RNG.standard_normal((count, 3)).astype("f4")
    writer = Writer(tmp_path)
    for number in range(count):
        writer.put(key("loss"), "float32", values[number], iteration=number // 4, micro_batch=number % 4)
    assert writer.pipeline.close(PATIENCE_S)
    assert not writer.outcomes.refusals
    assert len(writer.outcomes.committed_sequences) == count

    [series] = capd.open(writer.run).series
    assert len(series) == count
    for number in (0, 1, 4095, 4096, 65_535, 65_536, count - 1):
        assert series.numpy(number).tobytes() == values[number].tobytes()
        assert (series.records[number].iteration, series.records[number].micro_batch) == divmod(number, 4)
    group = writer.run / series.path
    assert zarr.open_array(group / "data", mode="r")[...].tobytes() == values.tobytes()
    assert with_tensorstore(group / "data").tobytes() == values.tobytes()
    moments = [(moment.iteration, moment.micro_batch) for moment, _ in published_rows(group)]
    assert moments == [divmod(number, 4) for number in range(count)]
    table = zarr.open_array(group / "moments", mode="r")
    assert with_tensorstore(group / "moments").tobytes() == table[...].tobytes()


@pytest.mark.fault
@pytest.mark.timeout(PATIENCE_S)
def test_twenty_thousand_series_on_few_descriptors(tmp_path: Path, few_descriptors: None) -> None:
    count = 20_000
    writer = Writer(tmp_path, open_files=64)
    for turn in range(2):
        for number in range(count):
            identity = key(f"t{number % 100}", layer=number // 100)
            writer.put(identity, "int32", np.array([turn, number], "i4"), iteration=turn)
    assert writer.pipeline.close(PATIENCE_S)
    assert not writer.outcomes.refusals

    found = capd.open(writer.run).series
    assert len(found) == count
    assert all(len(series) == 2 for series in found)
    for series in found[:: count // 100]:
        number = (series.key.layer or 0) * 100 + int(series.key.tensor_name[1:])
        expected = np.array([[0, number], [1, number]], "i4")
        data = writer.run / series.path / "data"
        assert [series.numpy(turn).tolist() for turn in range(2)] == expected.tolist()
        assert zarr.open_array(data, mode="r")[...].tolist() == expected.tolist()
        assert with_tensorstore(data).tolist() == expected.tolist()
    assert not list(writer.run.glob(".capd/node=n0/spool/*"))


@pytest.mark.slow
def test_many_open_shards_on_few_descriptors(tmp_path: Path, few_descriptors: None) -> None:
    writer = Writer(tmp_path, open_files=8)
    for turn in range(2):
        for number in range(150):
            bits = np.frombuffer(RNG.bytes(1200), "u2").reshape(3, 200)
            large = np.broadcast_to(bits, (230, 3, 200))
            writer.put(key(f"t{number}"), "bfloat16", large, iteration=turn)
    writer.close()

    assert not writer.outcomes.refusals
    assert_capd_reads(writer.run, writer.held)
    assert_zarr_readers_read(writer.run, writer.held)


def test_a_record_larger_than_a_shard_gets_one_of_its_own(tmp_path: Path) -> None:
    writer = Writer(tmp_path, shard_nbytes=1 << 20)
    for iteration, rows in enumerate((2_100, 2_100, 700, 4_300)):
        bits = np.frombuffer(RNG.bytes(rows * 4096), "f4").reshape(rows, 1024)
        writer.put(key("wide"), "float32", bits, iteration=iteration)
    writer.close()

    assert_capd_reads(writer.run, writer.held)
    assert_zarr_readers_read(writer.run, writer.held)
    first, grown = sorted(capd.open(writer.run).series, key=lambda series: series.path)
    assert first.zarr().shards == (1, first.zarr().shards[1], 1024)
    assert len(list((writer.run / first.path / "data" / "c").iterdir())) == 3
    assert len(grown) == 1


def test_a_record_larger_than_all_memory_that_it_may_take_comes_chunk_by_chunk(tmp_path: Path) -> None:
    """No arena needs to hold it: the store never asks for more of it than one chunk, and half of it leaves nothing."""
    rows, width = 24, 1 << 20
    identity = key("wide")
    store = RunStore(tmp_path, "run", "n0", StoreOptions(shard_nbytes=64 << 20))

    def row_of(iteration: int, number: int) -> np.ndarray:
        return np.random.default_rng((iteration, number)).standard_normal(width, dtype="f4")

    def chunks(plan: Plan, iteration: int, count: int) -> Iterator[ChunkResult]:
        for ordinal, (part, _) in list(plan.geometry.chunks((rows, width)))[:count]:
            block = np.concatenate([row_of(iteration, n)[None] for n in range(part.start, part.stop)])
            yield ChunkResult(ordinal, plan.chain.encode(block), block.nbytes, None)
        if count < rows:
            raise StoreError("whoever sent it is gone")

    sample = row_of(0, 0).tobytes()
    tracemalloc.start()
    for sequence, count in enumerate((rows, rows // 2, rows)):
        plan = store.plan(identity, "float32", {}, (rows, width), sample)
        row = RecordRow(CLIENT, sequence, (rows, width), rows * width * 4, Moment(sequence))
        with contextlib.nullcontext() if count == rows else pytest.raises(StoreError, match="is gone"):
            store.commit(plan, row, chunks(plan, sequence, count))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    store.seal()
    store.close()

    assert plan.geometry.chunk == (1, width)
    assert peak < 32 << 20 < rows * width * 4
    [series] = capd.open(tmp_path / "run.zarr").series
    assert [record.iteration for record in series.records] == [0, 2]
    for number, iteration in enumerate((0, 2)):
        for at in (0, 17, rows - 1):
            assert np.array_equal(series.numpy(number, (slice(at, at + 1), ...))[0], row_of(iteration, at))
    plain = zarr.open_array(tmp_path / "run.zarr" / series.path / "data", mode="r")
    assert plain.shape == (2, rows, width)
    assert np.array_equal(plain[1, 20], row_of(2, 20))


def test_ragged_axes_empty_tensors_and_scalars_in_many_variants(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for iteration in range(13):  # every record outgrows all before it
        length = 0 if iteration == 0 else 3**iteration // 8
        writer.put(key("growing"), "int64", RNG.integers(0, 1 << 60, length), iteration=iteration)
    for iteration in range(60):
        shape = tuple(int(n) for n in RNG.integers(0, 40, 3))
        writer.put(key("ragged"), "uint8", RNG.integers(0, 256, shape).astype("u1"), iteration=iteration)
    for ndim in range(7):
        for iteration, extent in enumerate((0, 1, 2)):
            bits = RNG.integers(0, 1 << 15, (extent,) * ndim).astype("i2")
            writer.put(key("ndim"), "int16", bits, iteration=iteration, call=ndim)
    writer.close()

    assert not writer.outcomes.refusals
    assert_capd_reads(writer.run, writer.held)
    assert_zarr_readers_read(writer.run, writer.held)
    variants = [series for series in capd.open(writer.run).series if series.key.tensor_name == "growing"]
    assert len(variants) > 8
