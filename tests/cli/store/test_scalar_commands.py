"""Scalars on the command line: listed, shown, exported, counted, compared and reported."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.store.cli import Result, StoreWriter
from tests.kit.store.scalars import damage_scalar, put_scalar, write_scalars

Capd = Callable[..., Result]
LOSSES = [[3.0, 2.0, math.nan], [1.0, 2.0, math.inf]]
RATES = [0.1, 1 / 3]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scalars(tmp_path_factory.mktemp("runs"), "run", LOSSES, RATES)


def test_ls_lists_them_apart(capd: Capd, run: Path) -> None:
    series, found = capd("ls", run), capd("ls", run, "--scalars", "--json")

    assert "scalar/" not in series.out
    assert "2 scalars beside them" in series.err
    assert found.json == [
        {"name": "loss", "rank": 0, "records": 3, "first_iteration": 0, "last_iteration": 2, "last": "NaN"},
        {"name": "loss", "rank": 1, "records": 3, "first_iteration": 0, "last_iteration": 2, "last": "Infinity"},
        {"name": "rate", "rank": 0, "records": 2, "first_iteration": 0, "last_iteration": 1, "last": 1 / 3},
    ]  # fmt: skip
    assert [item["name"] for item in capd("ls", run, "--scalars", "--tensor", "rate", "--json").json] == [
        "rate"
    ]
    assert re.search(r"^rate +0 +2 +0 +1 +0\.333$", capd("ls", run, "--scalars").out, re.MULTILINE)


def test_ls_says_what_there_is_where_none_matches(capd: Capd, run: Path, store_root: Path) -> None:
    found = capd("ls", run, "--scalars", "--tensor", "los")
    assert (found.code, "none of loss, rate matches" in found.err) == (5, True)
    found = capd("ls", store_root / "second.zarr", "--scalars")
    assert (found.code, "capd_client.scalar" in found.err) == (5, True)
    assert capd("ls", run, "--scalars", "--by", "rank").code == 2


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of scalars alone: one is damaged on rank 1, one has two values at each place, one has a bad name."""
    writer = StoreWriter(tmp_path_factory.mktemp("odd"))
    for rank in range(2):
        put_scalar(writer, "run", "loss", rank, 0.5, 0)
    for number in range(4):
        put_scalar(writer, "run", "again", 0, number, number // 2)
    put_scalar(writer, "run", "evil\x1b[31m\nrow", 0, 1.0, 0)
    run = writer.close() / "run.zarr"
    damage_scalar(run, "loss", 1)
    return run


def test_a_damaged_scalar_costs_the_others_nothing(capd: Capd, odd: Path, tmp_path: Path) -> None:
    for words in (
        ("ls", odd, "--scalars"),
        ("show", odd, "loss"),
        ("export", odd, "--to", "csv", "-o", tmp_path / "out"),
    ):
        done = capd(*words)
        assert (done.code, "skipped scalar loss of rank 1: " in done.err) == (4, True)
    assert re.search(r"^ +0 +0 +0 +0\.500$", capd("show", odd, "loss").out, re.MULTILINE)
    rows = (tmp_path / "out/scalars.csv").read_text().splitlines()
    assert sum(row.startswith("loss,") for row in rows) == 1
    none = capd("show", odd, "loss", "--json")
    assert [one["rank"] for one in none.json["ranks"]] == [0]


def test_values_at_one_place_are_all_shown(capd: Capd, odd: Path) -> None:
    lines = capd("show", odd, "again").out.splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["0", "0", "0", "0"], ["0", "0", "0", "1"], ["1", "0", "0", "2"], ["1", "0", "0", "3"],
    ]  # fmt: skip


def test_ls_of_a_run_without_tensors_lists_its_scalars(capd: Capd, odd: Path) -> None:
    plain = capd("ls", odd)
    assert plain.out == capd("ls", odd, "--scalars").out
    assert "no tensors, only scalars" in plain.err
    assert (capd("ls", odd, "--json").json, capd("ls", odd, "--json").code) == ([], 5)


def test_no_name_of_a_store_reaches_the_terminal_raw(capd: Capd, odd: Path) -> None:
    for words in (("ls", odd), ("show", odd, "missing"), ("ls", odd, "--scalars", "--tensor", "x")):
        done = capd(*words)
        assert "\x1b" not in done.out + done.err
    assert len(capd("ls", odd).out.splitlines()) == 4


def test_show_has_a_column_for_each_rank(capd: Capd, run: Path) -> None:
    lines = capd("show", run, "loss").out.splitlines()
    assert lines[0].split() == ["iteration", "micro", "call", "rank", "0", "rank", "1"]
    assert [line.split() for line in lines[1:]] == [
        ["0", "0", "0", "3", "1"],
        ["1", "0", "0", "2", "2"],
        ["2", "0", "0", "nan", "inf"],
    ]
    last = capd("show", run, "loss", "--limit", "1")
    assert last.out.splitlines()[1].split()[0] == "2"
    assert "the last 1 of 3" in last.err
    assert capd("show", run, "rate", "--json").json == {
        "scalar": "rate",
        "ranks": [
            {
                "rank": 0, "iteration": [0, 1], "micro_batch": [0, 0], "call": [0, 0], "time_ns": [1000, 1001],
                "values": RATES,
            }
        ],
    }  # fmt: skip


def test_export_writes_numbers_that_give_the_same_float64(capd: Capd, run: Path, tmp_path: Path) -> None:
    said = capd("export", run, "--to", "csv", "--json")
    assert (said.code, said.json) == (0, {"directory": None, "format": "csv", "records": 8})

    assert capd("export", run, "--to", "csv", "-o", tmp_path / "out").code == 0
    with (tmp_path / "out/scalars.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["value"]) for row in rows if row["name"] == "rate"] == RATES
    losses = [row["value"] for row in rows if row["name"] == "loss"]
    assert losses == ["3.0", "2.0", "nan", "1.0", "2.0", "inf"]
    assert rows[1] == {
        "name": "loss", "rank": "0", "iteration": "1", "micro_batch": "0", "call": "0", "time_ns": "1001",
        "value": "2.0",
    }  # fmt: skip
    again = capd("export", run, "--to", "csv", "-o", tmp_path / "out")
    assert (again.code, "exists already" in again.err) == (1, True)
    none = capd("export", run, "--to", "csv", "--tensor", "weight")
    assert (none.code, "its scalars: loss, rate" in none.err) == (5, True)


def test_stats_counts_them(capd: Capd, run: Path) -> None:
    assert capd("stats", run, "--json").json["scalar_records"] == 8
    assert re.search(r"^scalars +8 of 14 records$", capd("stats", run).out, re.MULTILINE)


def test_compare_says_where_two_runs_part(capd: Capd, run: Path, tmp_path: Path) -> None:
    other = write_scalars(tmp_path, "other", [[3.0, 2.5, math.nan]], [0.1, 1 / 3, 9.0])

    found = capd("compare", run, other, "--json").json["scalars"]
    assert found == [
        {"name": "loss", "rank": 0, "left_last": "NaN", "right_last": "NaN", "compared": 3,
         "first_different": 1, "max_abs": 0.5},
        {"name": "rate", "rank": 0, "left_last": 1 / 3, "right_last": 9.0, "compared": 2,
         "first_different": None, "max_abs": 0.0},
    ]  # fmt: skip
    table = capd("compare", run, other).out
    assert re.search(r"^loss +0 +3 +nan +nan +1 +0\.500$", table, re.MULTILINE)
    assert re.search(r"^rate +0 +2 +0\.333333 +9.* nowhere +0$", table, re.MULTILINE)
    assert capd("compare", run, "--between", "rank=0,1", "--json").json["scalars"] == []


def page_of(path: Path) -> Any:
    found = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_report_has_their_mean_and_spread_over_ranks(capd: Capd, run: Path, tmp_path: Path) -> None:
    assert capd("report", run, "-o", tmp_path / "page.html", "--quick").code == 0

    assert page_of(tmp_path / "page.html")["scalars"] == [
        {"source": str(run), "name": "loss", "ranks": 2, "values": 6, "iteration": [0, 1, 2],
         "mean": [2, 2, "NaN"], "min": [1, 2, "Infinity"], "max": [3, 2, "Infinity"]},
        {"source": str(run), "name": "rate", "ranks": 1, "values": 2, "iteration": [0, 1],
         "mean": [0.1, 0.3333], "min": [0.1, 0.3333], "max": [0.1, 0.3333]},
    ]  # fmt: skip


def test_the_report_of_a_directory_has_them_as_json_and_text(capd: Capd, run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert capd("report", run, "-o", tmp_path / "out", "--quick").code == 0

    document = json.loads((tmp_path / "out/global_statistics.json").read_text())
    assert [line["mean"] for line in document["scalars"]] == [[2.0, 2.0, "NaN"], RATES]
    text = (tmp_path / "out/global_statistics_report.txt").read_text()
    assert re.search(r"^rate +1 +0 to 1 +0\.1 +0\.333333 +0\.1 +0\.333333$", text, re.MULTILINE)
