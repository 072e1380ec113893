"""Reading where an event loop is running, as it is in a notebook."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

import capd
from capd.store.documents import zarr_json
from capd.store.verify.run import verify_run
from tests.kit.store.writing import Writer, key


def test_everything_is_read_beside_a_running_event_loop(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    bits = np.arange(60, dtype="f4").reshape(3, 20)
    for iteration in range(3):
        writer.put(key(), "float32", bits + iteration, iteration=iteration)
    writer.close()
    zarr_json._array_template.cache_clear()
    zarr_json.table_document.cache_clear()

    async def cell() -> None:
        [series] = capd.open(writer.run).series
        assert np.array_equal(series.numpy(2), bits + 2)
        assert np.array_equal(series.zarr()[1], bits + 1)
        assert verify_run(writer.run).ok

    asyncio.run(cell())
