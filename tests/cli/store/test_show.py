"""`capd show`: a series, a record, how a series is named, and numbers that match the captured values."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capd.cli.store.histogram import value_counts
from capd.live.bars import exponent_bars
from tests.kit.store.cli import Result

Capd = Callable[..., Result]
INPUT = "bf16/rank0/layer0/pre/blocks.0.mlp.fc1.forward.input"


def test_a_record_shows_moment_statistics_values_and_histograms(capd: Capd, second: Path) -> None:
    found = capd("show", second, f"{INPUT}#0", "--values", "8", "--json").json

    assert (found["iteration"], found["micro_batch"], found["sample_idx"], found["index"]) == (3, 0, 9, 0)
    assert (found["dtype"], found["shape"], found["metadata"]) == ("bfloat16", [2, 4], {"note": "hello"})
    assert found["requires_grad"]
    assert found["values"] == [1.0, -2.0, 0.0, 0.5, "Infinity", 4.0, -0.0, "NaN"]
    assert math.copysign(1, found["values"][6]) == -1
    stats = found["stats"]
    assert (stats["count"], stats["nan"], stats["inf"], stats["zero"]) == (8, 1, 1, 2)
    assert (stats["min"], stats["max"], stats["absmax"], stats["sum"]) == (-2.0, 4.0, 4.0, 3.5)
    assert stats["exponent_histogram"] == {"0": 2, "126": 1, "127": 1, "128": 1, "129": 1, "255": 2}
    assert sum(found["value_histogram"]["counts"]) == 6


def test_a_record_of_statistics_shows_them_and_says_that_there_are_no_values(
    capd: Capd, both_kinds: Path
) -> None:
    tensor, statistics = (capd("show", both_kinds, f"{INPUT}{end}#0", "--json").json for end in ("", "~v1"))

    assert (tensor["kept"], statistics["kept"]) == ("tensor", "statistics")
    assert statistics["stats"] == tensor["stats"]
    assert (statistics["dtype"], statistics["shape"]) == ("bfloat16", [2, 4])
    assert (statistics["values"], statistics["value_histogram"]) == (None, None)
    text = capd("show", both_kinds, f"{INPUT}~v1#0").out
    for piece in ("bfloat16, statistics only", "shape 2×4", "absmax      4", "NaN, Inf", "not kept"):
        assert piece in text
    assert capd("show", both_kinds, f"{INPUT}~v1", "--json").json["records"][0]["stats"] == tensor["stats"]


def test_a_series_lists_its_records(capd: Capd, second: Path) -> None:
    found = capd("show", second, INPUT, "--json").json

    assert [record["micro_batch"] for record in found["records"]] == [0, 1]
    assert found["shape"] == [2, 2, 4]


def test_the_text_names_key_dtype_moment_and_histogram(capd: Capd, second: Path) -> None:
    found = capd("show", second, f"{INPUT}#-1")

    assert found.code == 0
    for piece in ("bfloat16", "layer 0", "micro_batch 1", "shape 2×4", "NaN, Inf", "2^1", "hello"):
        assert piece in found.out
    assert "2 records" not in capd("show", second, INPUT, "--limit", "1").out


@pytest.mark.parametrize(
    "name", ["fc1.forward.input", "blocks.0.mlp.fc1.forward.input", "bf16/*.input", INPUT + "/"]
)
def test_a_unique_end_or_glob_names_a_series(capd: Capd, second: Path, name: str) -> None:
    assert capd("show", second, name, "--json").json["path"] == INPUT


def test_an_ambiguous_name_lists_candidates_and_a_wrong_one_exits_with_5(capd: Capd, second: Path) -> None:
    several = capd("show", second, "forward.output")

    assert several.code == 2
    assert "lm_head" in several.err
    assert capd("show", second, "nothing").code == 5
    assert capd("show", second, f"{INPUT}#2").code == 5
    assert capd("show", second, f"{INPUT}#x").code == 2


def test_a_scalar_record_can_be_shown(capd: Capd, second: Path) -> None:
    found = capd("show", second, "*grad_output#0")

    assert found.code == 0
    assert "shape scalar" in found.out


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=50))
def test_value_histogram_counts_every_finite_value_once(numbers: list[float]) -> None:
    edges, counts = value_counts(np.array(numbers, dtype=np.float64))

    assert sum(counts) == sum(math.isfinite(number) for number in numbers)
    assert edges == sorted(edges)
    assert len(edges) == (len(counts) + 1 if counts else 0)


def test_exponent_bars_join_neighbours_when_there_are_many() -> None:
    lines = exponent_bars({0: 5, **dict.fromkeys(range(1, 255), 1), 255: 2})

    assert len(lines) <= 34
    assert lines[0].endswith(" 5")
    assert lines[-1].endswith(" 2")
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == 254 + 7
