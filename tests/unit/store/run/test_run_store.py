"""What is written is what every reader reads: dtypes, shapes, variants, continuation, readers without capd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray
import zarr

import capd
from capd.errors import CapdError, DamagedRecord, NotAStore, StoreError
from capd.store.format.dtypes import stored_type
from capd.store.run import small_records
from capd.store.run.run_store import RunStore
from capd.store.run.small_records import Room
from capd_client.protocol.dtypes import ITEM_NBYTES
from tests.kit.store.reading import assert_capd_reads, assert_zarr_readers_read, published_rows
from tests.kit.store.writing import Writer, key

RNG = np.random.default_rng(7)


def random_bits(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Any bit pattern at all, NaN payloads and -0 among them (0 and 1 for bool)."""
    stored = stored_type(dtype).stored
    if dtype == "bool":
        return RNG.integers(0, 2, shape).astype(bool)
    return np.frombuffer(RNG.bytes(int(np.prod(shape)) * stored.itemsize), stored).reshape(shape)


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for dtype in ITEM_NBYTES:
        for name, shape in {"scalar": (), "empty": (0, 3), "small": (5, 7), "large": (3, 129, 1031)}.items():
            for iteration in range(2):
                writer.put(key(name), dtype, random_bits(dtype, shape), iteration=iteration)
    writer.flush()
    assert_capd_reads(writer.run, writer.held)  # live, nothing sealed
    writer.close()

    assert not writer.outcomes.refusals
    assert_capd_reads(writer.run, writer.held)
    assert_zarr_readers_read(writer.run, writer.held)


def test_records_may_vary_along_any_axis(tmp_path: Path) -> None:
    writer = Writer(tmp_path, shard_nbytes=8 << 20)
    shapes = [
        (64, 2048),
        (10, 2048),
        (64, 100),
        (65, 2048),
        (300, 3000),
        (0, 2048),
        (64, 2048),
        (2, 3, 4),
        (70, 1),
    ]
    for iteration, shape in enumerate(shapes):
        writer.put(key("ragged"), "float32", random_bits("float32", shape), iteration=iteration)
        writer.put(
            key("experts"), "bfloat16", random_bits("bfloat16", (iteration % 5, 32)), iteration=iteration
        )
    writer.close()

    assert_capd_reads(writer.run, writer.held)
    assert_zarr_readers_read(writer.run, writer.held)
    variants = [s for s in capd.open(writer.run).series if s.key.tensor_name == "ragged"]
    assert len(variants) == 4  # extents of the first, two grown ones, another ndim
    assert all(s.path.partition("~v")[0] == variants[0].path for s in variants)


def test_shards_fill_seal_and_continue_after_a_restart(tmp_path: Path) -> None:
    held = {}
    for start in (0, 5, 9):
        writer = Writer(tmp_path, shard_nbytes=2 << 20)
        writer.sequence = start * 100
        writer.held = held
        for iteration in range(start, start + 5):
            writer.put(key("large"), "float32", random_bits("float32", (256, 512)), iteration=iteration)
            for call in range(150):
                bits = random_bits("float32", (2, 33))
                writer.put(key("small"), "float32", bits, iteration=iteration, call=call)
        writer.close()
        assert_zarr_readers_read(writer.run, held)

    assert_capd_reads(writer.run, held)
    large = next(s for s in capd.open(writer.run).series if s.key.tensor_name == "large")
    assert large.zarr().shards[0] == 4
    assert sorted(p.name for p in (writer.run / large.path / "data" / "c").iterdir()) == ["0", "1", "2", "3"]
    assert not list((writer.run / ".capd" / "node=n0" / "spool").iterdir())


def test_beyond_ten_thousand_records_moments_stand_in_an_array(tmp_path: Path) -> None:
    held = {}
    for start, count in ((0, 10_050), (10_050, 500)):
        writer = Writer(tmp_path)
        writer.sequence, writer.held = start, held
        for iteration in range(start, start + count):
            writer.put(key("loss"), "float32", np.array(iteration, "f4"), iteration=iteration)
        writer.close()

    group = next(path.parent for path in writer.run.glob("bf16/rank0/layer0/pre/*/data"))
    assert [moment.iteration for moment, _ in published_rows(group)] == list(range(10_550))
    assert "iteration" not in json.loads((group / "zarr.json").read_text())["attributes"]["capd"]["records"]
    assert_zarr_readers_read(writer.run, held)


def test_hostile_names_stay_inside_the_run_and_apart(tmp_path: Path) -> None:
    names = [
        "../../x",
        "a\nb",
        "A",
        "a",
        "é",
        "é",
        "zarr.json",
        "x" * 4096,
        "",
        "data",
        "c",
        ".capd",
        "\x00",
        "a/b",
    ]
    writer = Writer(tmp_path)
    for number, name in enumerate(names):
        identity = key(name, module=name, quant_type=name, phase=name)
        writer.put(identity, "int64", np.array([number]))
    writer.close()

    assert not writer.outcomes.refusals
    assert_capd_reads(writer.run, writer.held)
    assert {p.name for p in tmp_path.iterdir()} == {"run.zarr"}
    assert zarr.open_group(writer.run, mode="r") is not None


def test_different_keys_with_one_path_get_a_hash(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for number, stack in enumerate(["encoder", "decoder", "vision"]):
        for _ in range(2):
            writer.put(key(stack=stack, module="m"), "int64", np.array([number]))
    writer.close()

    assert_capd_reads(writer.run, writer.held)
    paths = sorted(s.path for s in capd.open(writer.run).series)
    assert paths[0].endswith("m.forward.input")
    assert all("~k" in path for path in paths[1:])


def test_equal_chunks_of_consecutive_records_are_stored_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    weight = random_bits("float32", (512, 512))
    for iteration in range(10):
        writer.put(key("weight"), "float32", weight, iteration=iteration)
    writer.close()

    assert_zarr_readers_read(writer.run, writer.held)
    [series] = capd.open(writer.run).series
    assert series.stored_bytes < 2 * weight.nbytes


def test_default_bf16_codec_separates_the_byte_planes(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    values = RNG.standard_normal((1024, 1024)).astype("f4")
    writer.put(key(), "bfloat16", (values.view("u4") >> 16).astype("u2"))
    writer.close()

    [series] = capd.open(writer.run).series
    assert series.raw_bytes / series.stored_bytes > 1.4  # blosc's automatic block size gives 1.28


def test_xarray_opens_a_series_as_written(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for iteration in range(3):
        writer.put(key("x", module="m"), "float32", random_bits("float32", (4, 5)), iteration=iteration)
    writer.close()
    [series] = capd.open(writer.run).series

    plain = xarray.open_zarr(writer.run / series.path, consolidated=False)["data"]
    ours = series.xarray()

    assert plain.dims == ("record", "dim_0", "dim_1")
    assert ours.coords["iteration"].values.tolist() == [0, 1, 2]
    assert ours.values.tobytes() == plain.values.tobytes() == series.dask().compute().tobytes()


def test_find_filters_and_returns_the_latest_attempt(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for attempt, iterations in ((0, range(4)), (1, range(2, 6))):
        for iteration in iterations:
            writer.put(key(layer=3), "int64", np.array(attempt), iteration=iteration, attempt=attempt)
    writer.put(key(layer=4), "int64", np.array(9))
    writer.close()
    store = capd.open(writer.run)

    [latest] = store.find(layer=3)
    [first] = store.find(layer=3, attempt=0)

    assert [(r.iteration, r.attempt) for r in latest.records] == [
        (0, 0),
        (1, 0),
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 1),
    ]
    assert [int(latest.numpy(i)) for i in range(6)] == [0, 0, 1, 1, 1, 1]
    assert len(first.records) == 4
    assert len(store.find(layer=[3, 4], attempt="all")) == 2
    assert len(store.to_pandas()) == 7
    assert len(store.to_pandas(attempt="all")) == 9
    with pytest.raises(CapdError, match="layre"):
        store.find(layre=3)


def test_a_flipped_bit_is_an_error_not_a_value(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for iteration in range(2):
        writer.put(key(module="m"), "bfloat16", random_bits("bfloat16", (512, 512)), iteration=iteration)
    writer.close()
    [series] = capd.open(writer.run).series
    shard = writer.run / series.path / "data" / "c" / "0" / "0" / "0"
    content = bytearray(shard.read_bytes())
    content[len(content) // 4] ^= 1
    shard.write_bytes(content)

    with pytest.raises(DamagedRecord, match=r"m\.forward\.input#0"):
        series.numpy(0)
    assert np.array_equal(series.numpy(1), writer.held[(series.key, series.dtype)][1][1])


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    zarr.open_group(tmp_path / "foreign.zarr", mode="w")
    (tmp_path / "newer.zarr").mkdir()
    document = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"capd": {"format": 99, "run_id": "newer"}},
    }
    (tmp_path / "newer.zarr" / "zarr.json").write_text(json.dumps(document))
    (tmp_path / "file.zarr").write_text("no directory")

    for name in ("foreign", "newer", "file", "absent"):
        with pytest.raises(NotAStore) as caught:
            capd.open(tmp_path / f"{name}.zarr")
        assert "\n" not in str(caught.value)
    for name in ("foreign", "newer", "file"):
        with pytest.raises(StoreError):
            Writer(tmp_path, run_id=name)
    assert sorted(p.name for p in (tmp_path / "foreign.zarr").iterdir()) == ["zarr.json"]


def test_small_records_are_kept_in_memory_only_as_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(40 * (64 + 512))
    reads: list[int] = []
    real = small_records.read_small

    def counted(fd: int, offset: int) -> Any:
        reads.append(offset)
        return real(fd, offset)

    monkeypatch.setattr(small_records, "read_small", counted)
    monkeypatch.setattr("capd.server.pipeline.pipeline.Room", lambda: room)
    writer = Writer(tmp_path)
    for number in range(100):
        writer.put(key(f"s{number % 3}"), "float32", RNG.standard_normal(16).astype("f4"))
    writer.flush()
    assert room.left == 0

    writer.pipeline.seal("run").result(timeout=30)

    assert (room.left, len(reads)) == (40 * (64 + 512), 60)
    writer.put(key("s0"), "float32", RNG.standard_normal(16).astype("f4"))
    writer.flush()
    assert room.left < 40 * (64 + 512)
    assert writer.pipeline.close_run("run").result(timeout=30) is None
    assert room.left == 40 * (64 + 512)
    writer.pipeline.close(30)
    assert_capd_reads(writer.run, writer.held)


def test_the_room_of_small_records_counts_before_they_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie in the log and in their shard at the same time, until the shard is safe."""
    maintain = RunStore.maintain
    monkeypatch.setattr(RunStore, "maintain", lambda store: None)
    writer = Writer(tmp_path)
    for iteration in range(20):
        writer.put(key("small"), "uint8", random_bits("uint8", (60, 1000)), iteration=iteration)
    writer.flush()
    counted = writer.pipeline.run_stats("run").stored_bytes + writer.pipeline.overhead_nbytes("run")

    writer.pipeline.post("run", maintain).result(timeout=30)
    taken = sum(path.stat().st_size for path in writer.run.rglob("*") if path.is_file())
    moved = writer.pipeline.run_stats("run").stored_bytes

    assert moved > 1_000_000
    assert taken > 2_000_000
    assert taken - 10_000 < counted  # metadata documents do not count
    assert writer.pipeline.overhead_nbytes("run") < counted - moved + 10_000
    writer.close()
