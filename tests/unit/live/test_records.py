"""The newest records of a catalog that is being written."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np

from capd.live.records import NewestRecords
from capd_client.protocol.key import Moment
from tests.kit.store.cli import StoreWriter, linear_key


def put(writer: StoreWriter, step: int, layers: int = 1, **key: object) -> None:
    for layer in range(layers):
        values = np.full((2, 3), float(step), "f4")
        moment = Moment(iteration=step, time_ns=1_000 * step + layer + 1)
        writer.put("run", linear_key(layer=layer, module=f"m.{layer}", **key), values, "float32", moment)


def catalog_of(root: Path) -> Path:
    return root / "run.zarr" / ".capd" / "node=node0" / "catalog.sqlite"


def test_records_are_listed_with_their_statistics_the_newest_first(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    put(writer, 1, layers=2)
    put(writer, 2)
    writer.close()
    newest = NewestRecords(tmp_path / "run.zarr", "node0")
    found = newest.look()

    assert [(r.key.layer, r.moment.iteration, r.number) for r in found] == [(0, 2, 1), (1, 1, 0), (0, 1, 0)]
    assert found[0].shape == (2, 3)
    assert found[0].dtype == "float32"
    assert found[0].stats is not None
    assert (found[0].stats.count, found[0].stats.absmax, found[0].stats.exponent_histogram) == (
        6,
        2.0,
        {128: 6},
    )
    assert newest.problem == ""
    assert newest.left_out == 0


def test_further_looks_read_what_is_new_and_count_what_they_leave_out(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    put(writer, 1)
    writer.close()
    newest = NewestRecords(tmp_path / "run.zarr", "node0", limit=5, clock=lambda: 0.0)
    assert len(newest.look()) == 1
    assert newest.look() == newest.records

    writer = StoreWriter(tmp_path)
    for step in range(2, 22):
        put(writer, step)
    writer.close()
    found = newest.look()
    assert [r.moment.iteration for r in found] == [21, 20, 19, 18, 17]
    assert newest.left_out == 15


def test_a_run_without_a_catalog_is_a_problem_and_no_error(tmp_path: Path) -> None:
    newest = NewestRecords(tmp_path / "run.zarr", "node0", clock=lambda: 0.0)

    assert newest.look() == []
    assert "no catalog" in newest.problem
    put(writer := StoreWriter(tmp_path), 1)
    writer.close()
    assert len(newest.look()) == 1
    assert newest.problem == ""


def test_a_damaged_row_is_counted_and_the_others_are_listed(tmp_path: Path) -> None:
    put(writer := StoreWriter(tmp_path), 1, layers=3)
    writer.close()
    with sqlite3.connect(catalog_of(tmp_path)) as db:
        db.execute("UPDATE records SET body=x'c1' WHERE series=2")
    newest = NewestRecords(tmp_path / "run.zarr", "node0")

    assert [r.key.layer for r in newest.look()] == [2, 0]
    assert newest.damaged == 1


def test_a_file_that_is_no_catalog_is_a_problem(tmp_path: Path) -> None:
    put(writer := StoreWriter(tmp_path), 1)
    writer.close()
    catalog_of(tmp_path).write_bytes(b"no catalog" * 1000)
    newest = NewestRecords(tmp_path / "run.zarr", "node0")

    assert newest.look() == []
    assert "cannot read the catalog" in newest.problem


def test_a_slow_look_is_followed_by_a_pause(tmp_path: Path) -> None:
    put(writer := StoreWriter(tmp_path), 1)
    writer.close()
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.5
        return now

    newest = NewestRecords(tmp_path / "run.zarr", "node0", clock=clock)
    assert newest.look()
    put(writer := StoreWriter(tmp_path), 2)
    writer.close()
    # The look took half a second: nothing is read for the next ten.
    assert [r.moment.iteration for r in newest.look()] == [1]
    now += 10
    assert [r.moment.iteration for r in newest.look()] == [2, 1]
