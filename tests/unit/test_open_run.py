"""`capd.open(run).compare`: the numbers of `capd compare`, as a table of pandas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import capd
from capd.errors import ConfigError, NothingMatched
from tests.kit.store.cli import damaged, run_capd
from tests.kit.store.writing import Writer, key


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rng, writer = np.random.default_rng(3), Writer(tmp_path)
    for layer in range(2):
        for name in ("weight", "grad_output"):
            values = rng.normal(scale=10.0**-layer, size=(64, 64)).astype("f4")
            writer.put(key(name, layer=layer), "float32", values)
    writer.put(key("token"), "int64", np.arange(4))
    writer.close()
    return writer.run


def test_the_table_has_the_numbers_of_capd_compare(run: Path) -> None:
    table = capd.open(run).compare(["mxfp8", "hifp8"], by=["layer", "tensor_name"])

    told = run_capd("compare", run, "--formats", "mxfp8,hifp8", "--by", "layer,tensor_name", "--json").json
    assert len(table) == 8
    for group in told["groups"]:
        for label, errors in group["errors"].items():
            [row] = table[
                (table.layer == group["layer"])
                & (table.tensor_name == group["tensor_name"])
                & (table.format == label)
            ].to_dict("records")
            assert row["sqnr_db"] == errors["sqnr_db"]
            assert row["best"] == (label == group["best"])
    assert table.groupby("format").sqnr_db.mean()["mxfp8"] > 20


def test_a_selection_and_the_default_formats(run: Path) -> None:
    table = capd.open(run).compare(by=(), tensor_name="weight")

    assert list(table.format) == ["fp8", "mxfp8", "mxfp4", "nvfp4", "hifp8"]
    assert set(table.records) == {2}


def test_what_cannot_be_compared_is_said(run: Path) -> None:
    store = capd.open(run)

    with pytest.raises(ConfigError, match="unknown format 'fp9'"):
        store.compare(["fp9"])
    with pytest.raises(ConfigError, match="by 'layr' is no field"):
        store.compare(by=["layr"])
    with pytest.raises(NothingMatched, match="int64 is no high-precision source"):
        store.compare(tensor_name="token")
    with pytest.raises(NothingMatched, match="the selection is empty"):
        store.compare(tensor_name="none")


def test_records_that_cannot_be_read_are_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"1 records of .* are left out: .*input#1"):
        table = capd.open(damaged(tmp_path)).compare(["mxfp8"])

    assert list(table.records) == [3]
