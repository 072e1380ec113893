"""`capd export --to npz|safetensors|parquet`: read by the libraries of those formats, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from safetensors import safe_open

from capd.store.read.store import Series, open_store
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.key import Moment
from tests.kit.store.cli import Result, StoreWriter, linear_key

Capd = Callable[..., Result]
SAFETENSORS_LACKS = {"float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"}  # kept as bits


@pytest.fixture(scope="module")
def every_dtype(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two records of every dtype, of different shapes, and one without elements or axes."""
    writer = StoreWriter(tmp_path_factory.mktemp("dtypes"))
    rng = np.random.default_rng(3)
    for dtype, item_nbytes in ITEM_NBYTES.items():
        for rows in (3, 2):
            bits = rng.integers(0, 2 if dtype == "bool" else 256, (rows, 4, item_nbytes), dtype=np.uint8)
            stored = bits.view(f"u{item_nbytes}")[..., 0]
            moment = Moment(iteration=rows, time_ns=7)
            writer.put("run", linear_key(tensor_name=dtype), stored, dtype, moment, metadata=b'{"note": 1}')
    writer.put("run", linear_key(tensor_name="empty"), np.zeros((0, 2), np.float32), "float32", Moment())
    writer.put("run", linear_key(tensor_name="scalar"), np.float32(2).reshape(()), "float32", Moment())
    return writer.close() / "run.zarr"


def series_of(run: Path) -> list[Series]:
    return open_store(run).series


def assert_describes(described: dict[str, Any], series: Series) -> None:
    assert described["path"] == series.path
    assert described["dtype"] == series.dtype
    assert described["key"]["tensor_name"] == series.key.tensor_name
    records = series.records
    assert [row["shape"] for row in described["records"]] == [list(record.shape) for record in records]
    assert [row["iteration"] for row in described["records"]] == [record.iteration for record in records]
    assert [row["metadata"] for row in described["records"]] == [record.metadata for record in records]


def test_npz_gives_the_stored_bits_to_plain_numpy(capd: Capd, every_dtype: Path, tmp_path: Path) -> None:
    assert capd("export", every_dtype, "--to", "npz", "--out", tmp_path).code == 0

    for series in series_of(every_dtype):
        with np.load(tmp_path / f"{series.path}.npz", allow_pickle=False) as found:
            for number in range(len(series)):
                assert found[str(number)].dtype == series.numpy(number).dtype
                assert found[str(number)].tobytes() == series.numpy(number).tobytes()
                assert found[str(number)].shape == series.numpy(number).shape
            assert_describes(json.loads(str(found["capd"])), series)


def test_safetensors_gives_the_dtypes_that_it_knows_and_bits_of_the_others(
    capd: Capd, every_dtype: Path, tmp_path: Path
) -> None:
    assert capd("export", every_dtype, "--to", "safetensors", "--out", tmp_path).code == 0

    for series in series_of(every_dtype):
        with safe_open(tmp_path / f"{series.path}.safetensors", framework="pt") as found:
            for number in range(len(series)):
                expected, tensor = series.torch(number), found.get_tensor(str(number))
                assert tensor.shape == expected.shape
                known = series.dtype not in SAFETENSORS_LACKS
                assert tensor.dtype == (expected.dtype if known else torch.uint8)
                assert tensor.numel() == 0 or torch.equal(
                    tensor.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
                )
            assert_describes(json.loads(found.metadata()["capd"]), series)


def test_a_table_has_a_row_per_record_with_its_statistics(
    capd: Capd, both_kinds: Path, tmp_path: Path
) -> None:
    done = capd("export", both_kinds, "--to", "parquet", "--out", tmp_path, "--json")

    assert done.json["records"] == 2
    rows = parquet.read_table(tmp_path / "records.parquet").to_pylist()
    assert sorted(row["kept"] for row in rows) == ["statistics", "tensor"]
    series = series_of(both_kinds)[0]
    stats = series.records[0].stats
    for row in rows:
        assert (row["quant_type"], row["rank"], row["layer"], row["iteration"]) == ("bf16", 0, 0, 3)
        assert row["shape"] == list(series.records[0].shape)
        assert [row[name] for name in ("count", "nan", "inf", "min", "max", "mean", "sum_sq")] == [
            stats.count, stats.nan, stats.inf, stats.min, stats.max, stats.mean, stats.sum_sq,
        ]  # fmt: skip
        assert dict(row["exponent_histogram"]) == stats.exponent_histogram


def test_the_selection_is_that_of_ls(capd: Capd, second: Path, tmp_path: Path) -> None:
    wanted = ("--rank", "1", "--layer", "none")

    assert capd("export", second, "--to", "npz", "--out", tmp_path, *wanted).code == 0

    [file] = tmp_path.rglob("*.npz")
    [listed] = capd("ls", second, "--json", *wanted).json
    assert str(file.relative_to(tmp_path)) == f"{listed['path']}.npz"


@pytest.mark.parametrize("to", ["npz", "safetensors", "parquet"])
def test_a_file_that_is_there_is_not_replaced(capd: Capd, second: Path, tmp_path: Path, to: str) -> None:
    assert capd("export", second, "--to", to, "--out", tmp_path).code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    again = capd("export", second, "--to", to, "--out", tmp_path)

    assert again.code == 1
    assert "exists already" in again.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_without_pyarrow_the_extra_is_named(second: Path, tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['pyarrow'] = None; from capd.cli.app import main; main(sys.argv[1:])"

    done = subprocess.run(
        [sys.executable, "-c", hidden, "export", second, "--to", "parquet", "--out", tmp_path],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 1
    assert "capd[table]" in done.stderr
    assert list(tmp_path.iterdir()) == []
