"""Series that keep only statistics: read, recovered, checked and repaired like any other."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr
from numpy.typing import NDArray

import capd
from capd.errors import CapdError
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.format.dtypes import stored_type
from capd.store.format.frames import FrameKind, StatsRow
from capd.store.format.packed_statistics import pack
from capd.store.format.statistics import public, summarise
from capd.store.repair.catalog import rebuild_catalog
from capd.store.verify.run import verify_run
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.key import Key
from capd_client.protocol.statistics_row import BINS, POWER_SUMS, ROW_FIELDS, ROW_NBYTES, ROW_VALUES
from tests.kit import tiers
from tests.kit.store.damaging import flip, frames, image, spool
from tests.kit.store.reading import published_rows
from tests.kit.store.repairing import repaired
from tests.kit.store.writing import CLIENT, Writer, key

RNG = np.random.default_rng(5)
SUMS = [ROW_FIELDS.index("sum"), ROW_FIELDS.index("sum_sq"), BINS.stop, BINS.stop + 1]
SERIES = "bf16/rank0/layer0/pre/tensor.forward.input"
What = tuple[Key, str, int, int, tuple[int, ...]]  # key, dtype, iteration, call and shape of a tensor
Expected = dict[What, NDArray[np.float64]]  # its statistics row


def some_bits(dtype: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Any bit pattern at all, NaN and infinities among them (0 and 1 for bool)."""
    stored = stored_type(dtype).stored
    if dtype == "bool":
        return RNG.integers(0, 2, shape).astype(bool)
    return np.frombuffer(RNG.bytes(int(np.prod(shape)) * stored.itemsize), stored).reshape(shape)


@dataclass
class Statistics:
    """A writer of statistics, and what the store must know of them."""

    writer: Writer
    expected: Expected = field(default_factory=dict)

    def put(self, key: Key, dtype: str, bits: NDArray[np.generic], iteration: int, call: int = 0) -> None:
        self.writer.put_statistics(key, dtype, bits, iteration=iteration, call=call)
        row = np.frombuffer(pack(summarise(bits, dtype)))
        self.expected[key, dtype, iteration, call, bits.shape] = row

    def put_some(self, first: int, count: int) -> None:
        for iteration in range(first, first + count):
            for rows in (0, 3, 200):
                bits = RNG.standard_normal((rows, 400)).astype("f4")
                self.put(key(), "float32", bits, iteration, rows)


def assert_rows(found: Expected, expected: Expected) -> None:
    """Everything is equal but the last bits of the sums, which depend on the order of adding up."""
    assert found.keys() == expected.keys()
    for what, row in expected.items():
        np.testing.assert_array_equal(np.delete(found[what], SUMS), np.delete(row, SUMS), str(what))
        np.testing.assert_allclose(found[what][SUMS], row[SUMS], rtol=1e-9, err_msg=str(what))


def assert_statistics(run: Path, expected: Expected) -> None:
    """capd.open knows exactly these statistics-only records."""
    found: Expected = {}
    for series in capd.open(run).series:
        for record in series.records if series.kept == "statistics" else ():
            what = (series.key, series.dtype, record.iteration, record.call, record.shape)
            assert what not in found
            numbers = {name: getattr(record.stats, name) for name in (*ROW_FIELDS, *POWER_SUMS)}
            bins = [n for pair in record.stats.exponent_histogram.items() for n in pair]
            found[what] = np.frombuffer(pack(StatsRow(**numbers, exponents=bins)))
    assert_rows(found, expected)


def assert_zarr_sees(run: Path, expected: Expected) -> None:
    """By zarr-python, tensorstore and the documents alone: one row per record, no hole."""
    found: Expected = {}
    for group in (path.parent for path in run.glob("*/rank*/layer*/*/*/zarr.json")):
        attributes = json.loads((group / "zarr.json").read_text())["attributes"]["capd"]
        if attributes["encoding"] != "statistics":
            continue
        array = zarr.open_array(group / "data", mode="r")
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(group / "data")}}
        assert tensorstore.open(spec).result().read().result().tobytes() == array[...].tobytes()
        rows = published_rows(group)
        assert array.shape == (len(rows), ROW_VALUES)
        for (moment, shape), row in zip(rows, array[...], strict=True):
            what = (Key(**attributes["key"]), attributes["dtype"], moment.iteration, moment.call, shape)
            found[what] = row
    assert_rows(found, expected)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    """A sealed run of 1500 statistics in several shared chunks."""
    statistics = Statistics(Writer(tmp_path_factory.mktemp("made")))
    statistics.put_some(0, 500)
    statistics.writer.close()
    return statistics.writer.run, statistics.expected


@pytest.mark.slow
def test_every_dtype_and_shape_comes_back_beside_tensors_of_the_same_key(tmp_path: Path) -> None:
    statistics = Statistics(Writer(tmp_path))
    for dtype in ITEM_NBYTES:
        for shape in ((), (0, 3), (5, 7), (3, 129, 1031)):
            for iteration in range(2):
                bits = some_bits(dtype, shape)
                statistics.put(key(), dtype, bits, iteration)
                statistics.writer.put(key(), dtype, bits[:1] if shape else bits, iteration=iteration)
    statistics.writer.flush()
    assert_statistics(statistics.writer.run, statistics.expected)  # live, nothing sealed
    statistics.writer.close()

    assert not statistics.writer.outcomes.refusals
    assert_statistics(statistics.writer.run, statistics.expected)
    assert_zarr_sees(statistics.writer.run, statistics.expected)
    assert verify_run(statistics.writer.run).damaged == []


@pytest.mark.parametrize(
    "options", [{"codec": "none"}, {"codec": "fast"}, {"codec": "zstd:3"}, {"durability": "durable"}], ids=str
)
def test_every_codec_and_durability_takes_them(tmp_path: Path, options: dict[str, object]) -> None:
    statistics = Statistics(Writer(tmp_path, **options))
    statistics.put_some(0, 3)
    statistics.put(
        key("large"), "bfloat16", some_bits("bfloat16", (3, 1 << 20)), 0
    )  # through the encode pool
    statistics.writer.close()

    assert_statistics(statistics.writer.run, statistics.expected)
    assert_zarr_sees(statistics.writer.run, statistics.expected)
    assert verify_run(statistics.writer.run).damaged == []


def test_whole_numbers_beyond_float64_stay_exact_beside_the_row(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.put_statistics(key(), "int64", np.array([-(2**63), 2**63 - 1, 2**53 + 1]))
    writer.close()

    [series] = capd.open(writer.run).series
    stats = series.records[0].stats
    assert (stats.min, stats.max, stats.absmax) == (-(2**63), 2**63 - 1, 2**63)


def test_one_series_holds_all_shapes_and_another_for_other_axes(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for shape in ((4, 5), (4000, 3), (0, 9), (2, 2, 2)):
        writer.put_statistics(key(), "float32", np.ones(shape, "f4"))
    writer.flush()
    writer.close()

    found = {
        series.path: [record.shape for record in series.records] for series in capd.open(writer.run).series
    }
    assert found == {SERIES: [(4, 5), (4000, 3), (0, 9)], f"{SERIES}~v1": [(2, 2, 2)]}
    again = Writer(tmp_path)  # which axes a series has is known after a restart, too
    again.sequence = writer.sequence
    again.put_statistics(key(), "float32", np.ones((7, 7), "f4"))
    again.put_statistics(key(), "float32", np.ones((1, 2, 3), "f4"))
    again.close()
    assert {series.path: len(series) for series in capd.open(writer.run).series} == {
        SERIES: 4,
        f"{SERIES}~v1": 2,
    }


def test_elements_that_were_not_kept_are_refused_with_the_reason(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.put_statistics(key(), "bfloat16", np.ones((2, 3), "u2"))
    writer.close()

    [series] = capd.open(writer.run).find(tensor_name="input")
    assert (series.kept, series.dtype, series.shape) == ("statistics", "bfloat16", (1, 2, 3))
    for read in (series.numpy, series.values):
        with pytest.raises(CapdError, match=r"only statistics were kept \(mode or policy stats\)"):
            read(0)
    for read_all in (series.stack, series.dask, series.xarray):
        with pytest.raises(CapdError, match="only statistics"):
            read_all()
    assert series.zarr().shape == (1, ROW_VALUES)
    table = capd.open(writer.run).to_pandas()
    assert table[["kept", "shape", "count"]].values.tolist() == [["statistics", (2, 3), 6]]


@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize("rows", [10, 1000])  # small, and through the encode pool
def test_statistics_that_the_rank_computed_are_not_computed_again(
    tmp_path: Path, rows: int, computed: bool
) -> None:
    handed = StatsRow(rows * 100, 0, 0, 0, -1.5, 2.5, 2.5, 7.0, 9.0, [127, rows * 100])
    writer = Writer(tmp_path, statistics=computed)
    bits = np.ones((rows, 100), "f4")
    writer.put_statistics(key("handed"), "float32", bits, handed)
    writer.resubmit(writer.sequence + 1, key("both"), "float32", bits, stats=handed)
    writer.sequence += 1
    writer.put_statistics(key("computed"), "float32", bits)
    writer.close()

    stats = {series.key.tensor_name: series.records[0].stats for series in capd.open(writer.run).series}
    assert stats["handed"] == stats["both"] == public(handed)
    assert stats["computed"] == public(summarise(bits, "float32"))  # also where statistics are switched off
    [both] = capd.open(writer.run).find(tensor_name="both")
    assert np.array_equal(both.numpy(0), bits)


@pytest.mark.parametrize("catalog", tiers.rows(["kept", "lost", "damaged"], ["kept"]))
def test_a_killed_writer_loses_no_statistics(tmp_path: Path, catalog: str) -> None:
    first = Statistics(Writer(tmp_path / "a"))
    first.put_some(0, 250)  # some stand in an open shard, some in the log
    first.writer.flush()
    first.writer.pipeline.post("run", lambda store: None).result(timeout=60)
    run = image(first.writer, tmp_path / "b")
    first.writer.close()
    node = run / ".capd" / "node=n0"
    if catalog == "lost":
        for path in node.glob(f"{CATALOG_NAME}*"):
            path.unlink()
    elif catalog == "damaged":
        (node / CATALOG_NAME).write_bytes(b"\xff" * 20_000)
        for suffix in ("-wal", "-shm"):
            (node / (CATALOG_NAME + suffix)).unlink(missing_ok=True)
    else:
        assert_statistics(run, first.expected)  # before any recovery

    second = Statistics(Writer(tmp_path / "b"), first.expected)
    assert second.writer.pipeline.committed("run", CLIENT) == [(1, first.writer.sequence)]
    second.writer.sequence = first.writer.sequence
    second.put_some(250, 3)
    second.writer.close()

    assert_statistics(run, second.expected)
    assert_zarr_sees(run, second.expected)
    assert verify_run(run).damaged == []


@pytest.mark.slow
def test_damage_is_found_and_repair_keeps_the_rest(made: tuple[Path, Expected], tmp_path: Path) -> None:
    run = tmp_path / "run.zarr"
    shutil.copytree(made[0], run)
    assert verify_run(run).damaged == []
    [shard] = [path for path in (run / SERIES / "data" / "c" / "0").rglob("*") if path.is_file()]
    flip(shard, frames(shard, FrameKind.CHUNK)[1].offset + 100)

    [damage] = [damage for damage in verify_run(run).damaged if damage.records]
    per_chunk = capd.open(run).series[0].zarr().chunks[0]
    assert damage.records == tuple(range(per_chunk, 2 * per_chunk))
    _, new = repaired(run)

    kept = list(made[1])  # in capture order
    expected = {what: made[1][what] for what in kept[:per_chunk] + kept[2 * per_chunk :]}
    assert_statistics(new, expected)
    assert_zarr_sees(new, expected)


def test_damage_in_the_log_is_found(tmp_path: Path) -> None:
    statistics = Statistics(Writer(tmp_path / "a"))
    statistics.put_some(0, 3)
    statistics.writer.flush()
    run = image(statistics.writer, tmp_path / "b")
    statistics.writer.close()
    log = spool(run, "small-*.log")
    flip(log, frames(log, FrameKind.RECORD)[4].offset + 50)

    assert [damage.records for damage in verify_run(run).damaged] == [(4,)]


def test_statistics_whose_commit_is_lost_come_from_the_row(
    made: tuple[Path, Expected], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run.zarr"
    shutil.copytree(made[0], run)
    [shard] = [path for path in (run / SERIES / "data" / "c" / "0").rglob("*") if path.is_file()]
    flip(shard, frames(shard, FrameKind.COMMIT)[0].offset + 100)

    with caplog.at_level("WARNING"):
        rebuild_catalog(run, "n0")

    assert "the published moments identify" in caplog.text
    assert_statistics(run, made[1])


def test_the_shards_alone_are_enough(made: tuple[Path, Expected], tmp_path: Path) -> None:
    run = tmp_path / "run.zarr"
    shutil.copytree(made[0], run, ignore=shutil.ignore_patterns(".capd"))

    assert_statistics(run, made[1])


def test_a_thousand_statistics_take_a_fraction_of_the_tensors(
    made: tuple[Path, Expected],
) -> None:
    [series] = capd.open(made[0]).series

    assert series.raw_bytes == 1500 * ROW_NBYTES
    assert series.stored_bytes < 1500 * 1000
