"""The newest records of a catalog that is being written."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np

from capd.live.records import NewestRecords
from capd.server.lab.copies import RecordCopy
from capd.server.lab.error_writer import ErrorWriter
from capd.server.lab.outcomes import LabFigures
from capd.store.catalog.rows import read_series
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import Define
from tests.kit.daemon import wait_for
from tests.kit.store.cli import StoreWriter, linear_key
from tests.kit.store.writing import NoLimit


def put(writer: StoreWriter, step: int, layers: int = 1, **key: object) -> None:
    for layer in range(layers):
        values = np.full((2, 3), float(step), "f4")
        moment = Moment(iteration=step, time_ns=1_000 * step + layer + 1)
        writer.put("run", linear_key(layer=layer, module=f"m.{layer}", **key), values, "float32", moment)


def measure(writer: StoreWriter, step: int) -> None:
    """Write the errors of the first layer's record, as the lab does."""
    define = Define(id=0, key=linear_key(layer=0, module="m.0"), dtype="float32")
    moment = Moment(iteration=step, time_ns=1_000 * step + 500)
    copy = RecordCopy("run", b"", step, define, moment, (2, 3), 24, (0, 24), lambda *_: None)
    figures = LabFigures()
    pipeline = writer._pipeline
    ErrorWriter({"sample": "1/1"}, 1, pipeline.post, NoLimit(), figures).write("run", [(copy, b"\xc0" * 64)])
    wait_for(lambda: sum(figures.read().records.values()), "the errors")
    assert figures.read().records["measured"] == 1


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


def test_errors_of_formats_are_neither_listed_nor_counted(tmp_path: Path) -> None:
    newest = NewestRecords(tmp_path / "run.zarr", "node0", limit=5, clock=lambda: 0.0)
    for first in (1, 11):
        writer = StoreWriter(tmp_path)
        for step in range(first, first + 3):
            put(writer, step)
            measure(writer, step)
        writer.close()
        newest.look()
    with sqlite3.connect(catalog_of(tmp_path)) as db:
        assert sorted((row.holds_errors, row.records) for row in read_series(db)) == [(False, 6), (True, 6)]

    assert [(r.dtype, r.moment.iteration) for r in newest.records] == [
        ("float32", step) for step in (13, 12, 11, 3, 2)
    ]
    assert (newest.left_out, newest.damaged, newest.problem) == (0, 0, "")


def test_of_several_series_all_records_that_no_list_had_are_counted(tmp_path: Path) -> None:
    put(writer := StoreWriter(tmp_path), 1, layers=3)
    writer.close()
    newest = NewestRecords(tmp_path / "run.zarr", "node0", limit=5, clock=lambda: 0.0)
    newest.look()
    writer = StoreWriter(tmp_path)
    for step in range(2, 12):
        put(writer, step, layers=3)
    writer.close()

    assert [r.moment.iteration for r in newest.look()] == [11, 11, 11, 10, 10]
    assert newest.left_out == 25


def test_a_run_that_is_begun_again_has_none_of_the_old_records(tmp_path: Path) -> None:
    put(writer := StoreWriter(tmp_path), 1, layers=2)
    writer.close()
    newest = NewestRecords(tmp_path / "run.zarr", "node0", clock=lambda: 0.0)
    assert len(newest.look()) == 2
    # The old directory stays, so that the new one has another inode.
    (tmp_path / "run.zarr").rename(tmp_path / "old")
    assert len(newest.look()) == 2
    writer = StoreWriter(tmp_path)
    moment = Moment(iteration=7, time_ns=7_000)
    writer.put("run", linear_key(layer=5, module="other"), np.zeros(3, "f4"), "float32", moment)
    writer.close()

    assert [(r.key.layer, r.moment.iteration) for r in newest.look()] == [(5, 7)]
    assert newest.left_out == 0
