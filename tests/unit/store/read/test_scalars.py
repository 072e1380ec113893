"""Scalars as they are read: apart from tensors, in order, of the latest attempt, bit for bit."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest

import capd
from capd.errors import NoSuchSeries
from capd.store.format.dtypes import stored_type
from capd_client.protocol.key import Moment
from capd_client.protocol.scalars import DTYPE, is_scalar, scalar_key
from tests.kit.store.cli import StoreWriter
from tests.kit.store.scalars import put_scalar, write_scalars


def test_scalars_are_read_apart_from_tensors(tmp_path: Path) -> None:
    run = write_scalars(tmp_path, "run", [[0.5, 0.1], [0.25, 0.75]], [1 / 3, 2 / 3, 1.0])

    store = capd.open(run)
    assert store.scalars() == {"loss": [0, 1], "rate": [0]}
    assert {series.key.tensor_name for series in store.series} == {"input"}
    assert {series.key.tensor_name for series in store.find()} == {"input"}
    loss = store.scalar("loss", rank=1)
    assert (loss.name, loss.rank, len(loss)) == ("loss", 1, 2)
    assert loss.values.tolist() == [0.25, 0.75]
    assert (loss.iterations.tolist(), loss.micro_batches.tolist(), loss.calls.tolist()) == (
        [0, 1], [0, 0], [0, 0],
    )  # fmt: skip
    assert loss.times.tolist() == [1_000, 1_001]
    assert [column.dtype.str for column in (loss.iterations, loss.times, loss.values)] == [
        "<i8", "<M8[ns]", "<f8",
    ]  # fmt: skip
    assert store.scalar("rate").values.tolist() == [1 / 3, 2 / 3, 1.0]
    totals = store.totals()
    assert (totals.records, totals.scalar_records) == (11, 7)


def test_every_float64_is_read_bit_for_bit(tmp_path: Path) -> None:
    patterns = [0x7FF8_0000_0000_1234, 0xFFF0 << 48, 0x7FF0 << 48, 1 << 63, 1, 0x7FEF_FFFF_FFFF_FFFF]
    writer = StoreWriter(tmp_path)
    for iteration, pattern in enumerate(patterns):
        [value] = struct.unpack("<d", struct.pack("<Q", pattern))
        put_scalar(writer, "run", "x", 0, value, iteration)
    writer.close()

    found = capd.open(tmp_path / "run.zarr").scalar("x").values
    assert found.view(np.uint64).tolist() == patterns


def test_the_latest_attempt_replaces_what_it_did_again(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    for attempt, iterations in enumerate((range(4), range(2, 6))):
        for iteration in iterations:
            put_scalar(writer, "run", "loss", 0, 10 * attempt + iteration, iteration, attempt=attempt)
    writer.close()

    store = capd.open(tmp_path / "run.zarr")
    assert store.scalar("loss").values.tolist() == [0, 1, 12, 13, 14, 15]
    assert store.scalar("loss", attempt=0).values.tolist() == [0, 1, 2, 3]
    assert store.scalar("loss", attempt="all").iterations.tolist() == [0, 1, 2, 2, 3, 3, 4, 5]


def test_the_first_rank_that_has_a_scalar_is_read_by_default(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    put_scalar(writer, "run", "loss", 3, math.pi, 0)
    writer.close()

    assert capd.open(tmp_path / "run.zarr").scalar("loss").rank == 3


def test_an_unknown_scalar_is_named_beside_those_that_there_are(tmp_path: Path) -> None:
    store = capd.open(write_scalars(tmp_path, "run", [[0.5]], [1.0]))

    with pytest.raises(NoSuchSeries, match=r"no scalar 'los'; it has loss, rate"):
        store.scalar("los")
    with pytest.raises(NoSuchSeries, match=r"no scalar 'loss' of rank 2; it has rank 0"):
        store.scalar("loss", rank=2)


def test_a_tensor_under_a_scalars_key_is_a_tensor(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    writer.put("run", scalar_key("x", 0), np.zeros(3), "float64", Moment(time_ns=1))
    writer.put("run", scalar_key("y", 0), np.zeros((), "float32"), "float32", Moment(time_ns=1))
    writer.close()

    store = capd.open(tmp_path / "run.zarr")
    assert store.scalars() == {}
    assert [series.key.tensor_name for series in store.series] == ["x", "y"]


def test_pandas_has_the_values_by_iteration_and_micro_batch(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    found = capd.open(write_scalars(tmp_path, "run", [[0.5, 0.1]], [])).scalar("loss").pandas()

    assert (found.name, found.loc[1, 0], list(found.index.names)) == (
        "loss", 0.1, ["iteration", "micro_batch"],
    )  # fmt: skip


def test_a_scalars_key_is_known_by_all_of_its_fields() -> None:
    key = scalar_key("loss", 2)
    assert is_scalar(key)
    assert not is_scalar(type(key)(quant_type="scalar", rank=2, tensor_name="loss"))
    assert stored_type(DTYPE).torch == "float64"
