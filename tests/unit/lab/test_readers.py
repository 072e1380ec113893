"""Errors of formats in a catalog: they go with their records, and nobody counts or lists them as records."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path

import pytest

import capd
from capd.lifecycle.inventory import look_at
from capd.lifecycle.uploaded import unsynced
from capd.lifecycle.usage import usage_by
from capd.live.records import NewestRecords
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.search import count_series, distinct_values, find_series
from capd.store.catalog.totals import held_by, sums_in
from capd.store.verify.run import verify_run
from tests.kit.store.cli import linear_key, run_capd
from tests.kit.store.measuring import FORMATS, MeasuredWriter, errors_in, measured_run, values_of

LABELS = FORMATS.split(",")
ALL = {(layer, step): LABELS for layer in range(2) for step in range(3)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return measured_run(tmp_path)


def path_of(run: Path, layer: int) -> str:
    return next(one.path for one in capd.open(run).series if one.key.layer == layer)


def test_an_exact_path_that_is_removed_takes_its_errors_along(run: Path) -> None:
    assert errors_in(capd.open(run)) == ALL
    done = run_capd("rm", run, "--series", path_of(run, 0), "--yes", "--json")
    assert done.code == 0, done.err
    assert (done.json["records"], len(done.json["series"])) == (3, 2)
    store = capd.open(run)
    assert errors_in(store) == {at: labels for at, labels in ALL.items() if at[0] == 1}
    assert store.totals().error_records == 3
    assert verify_run(run).error_records == 3


def test_a_copy_of_an_exact_path_or_of_iterations_has_their_errors(run: Path, tmp_path: Path) -> None:
    for number, (words, wanted) in enumerate(
        (
            (("--series", path_of(run, 0)), {at for at in ALL if at[0] == 0}),
            (("--iterations", "1"), {at for at in ALL if at[1] == 1}),
        )
    ):
        new = tmp_path / f"copy{number}.zarr"
        done = run_capd("cp", run, new, *words)
        assert done.code == 0, done.err
        assert errors_in(capd.open(new)) == dict.fromkeys(wanted, LABELS)


def test_verify_counts_them_apart(run: Path) -> None:
    report = verify_run(run)
    assert (report.ok, report.records, report.error_records) == (True, 6, 6)
    done = run_capd("verify", run)
    assert "6 records, errors of 6 records" in done.out
    found = run_capd("verify", run, "--json").json
    assert (found["records"], found["error_records"]) == (6, 6)


def test_totals_of_a_run_leave_them_out(run: Path) -> None:
    facts = look_at(run)
    assert (facts.records, facts.raw_bytes) == (6, 6 * 8 * 64 * 4)
    assert [usage.records for _, usage in usage_by([facts], ["layer"])] == [3, 3]
    assert [usage.series for _, usage in usage_by([facts], ["run"])] == [2]
    with contextlib.closing(connect_read_only(run / ".capd/node=node0/catalog.sqlite")) as db:
        quick = sums_in(db)
    assert quick == held_by(row for node in capd.open(run).nodes for row in node.series.values())


def test_live_views_list_tensors_alone(run: Path) -> None:
    newest = NewestRecords(run, "node0")
    assert [one.dtype for one in newest.look()] == ["float32"] * 6
    with contextlib.closing(connect_read_only(run / ".capd/node=node0/catalog.sqlite")) as db:
        assert [row.header.dtype for row in find_series(db, [], {})] == ["float32"] * 2
        assert count_series(db, [], {}) == 2
        assert distinct_values(db, "layer", 10) == [0, 1]


def test_an_uploaded_run_shows_the_same_records_and_is_known_as_whole(run: Path, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/bucket"
    assert run_capd("upload", run, address).code == 0
    assert unsynced(run) == []
    here = run_capd("runs", tmp_path, "--json").json[0]
    there = run_capd("runs", address, "--json").json[0]
    assert [here[name] for name in ("records", "raw_bytes")] == [
        there[name] for name in ("records", "raw_bytes")
    ]
    assert here["records"] == 6
    assert run_capd("verify", f"{address}/run.zarr", "--json").json["error_records"] == 6
    assert run_capd("verify", f"{address}/run.zarr", "--listing", "--json").json["error_records"] == 6
    assert errors_in(capd.open(f"{address}/run.zarr")) == ALL


def test_a_series_that_another_process_reopens_has_the_errors_that_came_since(tmp_path: Path) -> None:
    """As the workers of a cluster do: they keep a run open, and it grows."""
    writer = MeasuredWriter(tmp_path, node="node0")
    key = linear_key(quant_type="fp32")
    sequences = [writer.put(key, "float32", values_of(0, step), iteration=step) for step in (0, 1)]
    writer.measure(sequences[:1], key=key, values=values_of(0, 0), iteration=0)
    writer.close()
    for measured in (1, 2):
        [series] = capd.open(tmp_path / "run.zarr").series
        there = pickle.loads(pickle.dumps(series))  # noqa: S301 - our own
        assert [record.errors for record in there] == [record.errors for record in series]
        assert sum(bool(record.errors) for record in there) == measured
        if measured == 1:
            writer = MeasuredWriter(tmp_path, node="node0")
            writer.measure(sequences[1:], key=key, values=values_of(0, 1), iteration=1)
            writer.close()
