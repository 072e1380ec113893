"""What an export keeps of the records that it is done with: nothing, whatever the size of the store."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from capd.io.arrays import export_arrays
from capd.io.table import export_table
from capd.pt_files.dictionary import Naming
from capd.pt_files.export import export_pt
from capd.store.catalog import rows
from capd.store.read.store import open_store
from capd_client.protocol.key import Moment
from tests.kit.store.cli import StoreWriter, linear_key

SERIES, RECORDS = 20, 20


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    writer = StoreWriter(tmp_path_factory.mktemp("many"))
    for number in range(SERIES * RECORDS):
        key, moment = linear_key(layer=number % SERIES), Moment(iteration=number, time_ns=number)
        writer.put("run", key, np.full((4, 4), number, np.float32), "float32", moment)
    return writer.close() / "run.zarr"


@pytest.mark.parametrize("to", ["pt", "npz", "parquet"])
def test_an_export_holds_no_rows_of_series_that_are_done(many: Path, tmp_path: Path, to: str) -> None:
    chosen = open_store(many).series
    written = {
        "pt": lambda: export_pt("run", chosen, tmp_path, Naming(), threads=1),
        "npz": lambda: export_arrays("run", chosen, tmp_path, ".npz"),
        "parquet": lambda: export_table("run", chosen, tmp_path),
    }[to]

    tracemalloc.start()
    try:
        records = sum(file.records for file in written())
        read = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, rows.__file__)])
    finally:
        tracemalloc.stop()

    assert records == SERIES * RECORDS
    assert (
        sum(trace.size for trace in read.traces) < 100 * records
    )  # `chosen` lives on, and its rows would with it
