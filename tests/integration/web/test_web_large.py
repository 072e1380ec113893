"""A run with 100,000 tensors, and one with long series: the page stays within its memory, and answers page by page."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from capd.store.format.frames import SeriesHeader
from capd_client.protocol.key import Moment
from tests.kit.store.cli import StoreWriter, bf16_bits, linear_key
from tests.kit.web.page import web_page

TENSORS, LAYERS, RECORDS = 100_000, 100, 20
LIMIT_NBYTES = 256 << 20


def crowded(root: Path) -> Path:
    """A run whose catalog lists so many series: each as its first one, with a name of its own."""
    writer = StoreWriter(root)
    for iteration in range(RECORDS):
        bits = bf16_bits(np.random.default_rng(iteration).normal(size=(64, 64)))
        writer.put("run", linear_key(), bits, "bfloat16", Moment(iteration=iteration))
    writer.close()
    [catalog] = (root / "run.zarr").glob(".capd/node=*/catalog.sqlite")
    db = sqlite3.connect(catalog)
    [(_, _, *_fields, dtype, packed, records, sealed, sealing, shape, raw, stored)] = db.execute(
        "SELECT * FROM series"
    )
    header = msgspec.msgpack.decode(packed, type=SeriesHeader)
    rows = db.execute("SELECT record, attempt, stored_nbytes, body FROM records").fetchall()
    encode = msgspec.msgpack.Encoder().encode
    db.execute("DELETE FROM series")
    db.execute("DELETE FROM records")
    for number in range(TENSORS):
        layer, rank = number % LAYERS, number // LAYERS % 8
        one = msgspec.structs.replace(
            header.key, layer=layer, rank=rank, module=f"model.layers.{layer}.part{number}.fc"
        )
        path = f"bf16/rank{rank}/layer{layer}/pre/model.layers.{layer}.part{number}.fc.forward.input"
        values = [getattr(one, name) for name in one.__struct_fields__]
        packed = encode(msgspec.structs.replace(header, key=one, path=path))
        row = (number + 1, path, *values, dtype, packed, records, sealed, sealing, shape, raw, stored)
        db.execute(f"INSERT INTO series VALUES ({', '.join('?' * len(row))})", row)  # noqa: S608
        db.executemany(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?)",
            [(number + 1, *each) for each in rows[: 2 if number >= 2000 else RECORDS]],
        )
    db.commit()
    db.close()
    return root


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_100_000_tensors_within_256_mib(tmp_path: Path) -> None:
    root = crowded(tmp_path / "runs")
    with web_page(root, tmp_path) as page:
        run = page.ask("run", run="run")
        assert len(run["fields"]["layer"]) == LAYERS
        assert len(run["fields"]["module"]) == 500
        assert page.ask("series", run="run")["total"] == TENSORS
        found = page.ask("series", run="run", words="PART77777")
        assert (found["total"], found["series"][0]["layer"]) == (1, 77777 % LAYERS)
        last = page.ask("series", run="run", first=TENSORS - 3, most=100)
        assert len(last["series"]) == 3
        assert len(page.ask("layers", run="run", rank=3, words="part")["layers"]) > 0
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda rank: page.ask("layers", run="run", rank=rank % 8), range(16)))
        assert {(one["series"], one["more"]) for one in found} == {(2048, True)}
        path = page.ask("series", run="run", words="part7.")["series"][0]["path"]
        assert len(page.ask("tensor", run="run", path=path)["runs"][0]["iteration"]) == RECORDS
        assert page.ask("runs")["runs"][0]["records"] > TENSORS
        assert page.memory_nbytes() < LIMIT_NBYTES
        print(f"memory with {TENSORS:,} tensors: {page.memory_nbytes() / 2**20:.0f} MiB")
