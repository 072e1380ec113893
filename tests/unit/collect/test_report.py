"""The report of a collection run for people and machines, where there is much of it, or something is missing."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from capd.analyze.groups import Tally
from capd.collect.report import FIELDS, groups_of
from capd.collect.report_text import report_lines
from capd.collect.state import TypeState
from capd.store.format.statistics import public, summarise
from capd.strict_json import strict_json

STATS = public(summarise(np.array([1.0, -2.0, math.inf, math.nan], np.float32), "float32"))


def dropped_of(quant_type: str, reason: str, count: int) -> dict[str, Any]:
    return {"quant_type": quant_type, "reason": reason, "count": count}


def report(*dropped: dict[str, Any], layers: int = 2) -> dict[str, Any]:
    by = {name: groups_of({"x": Tally(3, 48, STATS)}) for name in FIELDS}
    by["layer"] = groups_of({layer: Tally(1, 16, STATS) for layer in (None, *range(layers - 1))})
    by["component"] = groups_of({"": Tally(3, 48, STATS)})
    by["rank"] = groups_of({0: Tally(3, 0)})
    types = [
        TypeState(quant_type="x", outcome="failed", reason="why", tries=2, exit_code=9),
        TypeState(quant_type="y"),
    ]
    emulation = {"x": {"none": 1, "a recipe": 2}, "y": {"a recipe": 3}}
    return {
        "path": "/s/r.zarr", "types": [one.model_dump() for one in types], "records": 3, "raw_bytes": 48,
        "stored_bytes": 32, "by": by, "dropped": list(dropped), "emulation": emulation,
    }  # fmt: skip


def test_the_first_line_speaks_of_drops_and_the_types_of_their_endings() -> None:
    lines = list(report_lines(report(dropped_of("x", "disk_full", 2), dropped_of("", "sampled", 1))))

    assert lines[0].startswith("2 captures were dropped: 2 disk_full (")
    assert lines[1] == "3 records in /s/r.zarr: 48 B raw, 32 B stored"
    assert lines[2:5] == [
        "1 record of x: a label: the job computed the values by itself (emulation: none)",
        "2 records of x: emulation: a recipe",
        "y: emulation: a recipe",
    ]
    at = lines.index("type  outcome    micro-batches  records  time  tries  exit code  why")
    assert lines[at + 1].split() == ["x", "failed", "0", "0", "0", "s", "2", "9", "why"]
    assert lines[at + 2].split() == ["y", "not", "tried", "0", "0", "0", "s", "0", "-"]
    assert lines[-3:] == [
        "x           disk_full      2", "none        sampled        1", "sampled: left out by the settings"
    ]  # fmt: skip
    assert next(report_lines(report())).startswith("3 records in")
    assert list(report_lines(report()))[-1] == "nothing was dropped"


def test_every_field_has_a_table_and_a_long_one_is_cut_in_the_text_alone() -> None:
    found = report(layers=60)
    lines = list(report_lines(found))

    assert [line.split()[0] for line in lines if " absmax " in line] == list(FIELDS)
    assert "… and 20 more: the JSON report has all" in lines
    [first] = [line for line in lines if line.split()[:1] == ["none"]]
    assert first.split() == ["none", "1", "16", "B", "-2", "1", "2", "-0.5", "1.5", "1", "1", "0"]
    assert len(found["by"]["layer"]) == 60


def test_the_json_is_strict() -> None:
    document = strict_json({**report(), "extra": [math.inf, -math.inf, math.nan, 1.5]})

    assert document["extra"] == ["Infinity", "-Infinity", "NaN", 1.5]
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["by"]["layer"][0] == {
        "value": None, "records": 1, "raw_bytes": 16, "count": 4, "nan": 1, "inf": 1, "zero": 0, "min": -2.0,
        "max": 1.0, "absmax": 2.0, "mean": -0.5, "std": 1.5,
    }  # fmt: skip


def test_groups_are_in_order_those_without_a_value_and_without_a_name_first() -> None:
    assert [one["value"] for one in groups_of({"linear": Tally(), "": Tally(), "FA": Tally()})] == [
        "",
        "FA",
        "linear",
    ]
    assert [one["value"] for one in groups_of({10: Tally(), None: Tally(), 0: Tally(), 9: Tally()})] == [
        None,
        0,
        9,
        10,
    ]
