"""The report's document, its text and its page tell the same numbers: exactly, as people read them, and rounded."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from capd.analyze.format_choice import choices
from capd.io.items import Item, Loaded
from capd.report.document import document, grouped, json_text
from capd.report.gather import BY_LAYER, BY_TENSOR, GatheredRecords, gather
from capd.report.page.data import page_data
from capd.report.page.plain import METRICS, NUMBERS, rounded
from capd.report.series import SeriesSummaries
from capd.report.text import report_lines
from capd.store.format.statistics import public, summarise
from capd_client.protocol.key import Key, Moment

FORMATS = choices("mxfp8,hifp8")


def item(number: int, layer: int, values: np.ndarray) -> Item:
    key = Key(quant_type="bf16", rank=0, layer=layer, tensor_name="input")
    stats = public(summarise(values, "float32"))
    moment = Moment(iteration=number, sample_idx=number)
    loaded = Loaded(key, moment, "float32", values.nbytes, stats, lambda: values, {}, values.shape)
    return Item(f"series{layer}#{number}", values.nbytes, lambda: loaded)


@pytest.fixture(scope="module")
def gathered() -> GatheredRecords:
    rng, found = np.random.default_rng(3), GatheredRecords(series=SeriesSummaries())
    values = [(rng.normal(size=(8, 64)) * 3.0 ** (layer * 4)).astype(np.float32) for layer in (0, 1, 2)]
    values[1][0, :3] = np.nan, np.inf, 1e30
    items = [item(number, number, one) for number, one in enumerate(values)]
    for _ in gather(items, found, threads=1, choices=FORMATS, channels=True):
        pass
    return found


@pytest.fixture(scope="module")
def plain(gathered: GatheredRecords) -> dict[str, Any]:
    return document(["run.zarr"], gathered, quick=False, choices=FORMATS)


def close(short: Any, exact: Any) -> bool:
    """Whether the page's number is the document's, to four digits."""
    if isinstance(short, str) or exact is None:
        return short == (None if exact is None else "Infinity" if exact > 0 else "-Infinity")
    return math.isclose(short, exact, rel_tol=6e-4)


def test_the_page_has_the_numbers_of_the_document_rounded(
    plain: dict[str, Any], gathered: GatheredRecords
) -> None:
    page = page_data(plain, gathered, files=True, choices=FORMATS)

    for cell, row in zip(page["cells"], grouped(plain, BY_LAYER), strict=True):
        assert [cell[name] for name in BY_LAYER] == [row[name] for name in BY_LAYER]
        assert all(close(cell[name], row[name]) for name in NUMBERS)
        for label, errors in row["errors"].items():
            assert all(map(close, cell["errors"][label], [errors[name] for name in METRICS]))
    [shown], [row] = page["distributions"], grouped(plain, BY_TENSOR)
    assert all(map(close, shown["quantiles"], row["quantiles"].values()))
    assert sum(shown["exponents"][1:]) == row["count"] - row["nan"] - row["inf"] - row["zero"]
    for use, exact in zip(page["hifp8"][1:], plain["hifp8"], strict=True):
        assert [one["count"] for one in use["regimes"]] == [one["count"] for one in exact["regimes"]]
        assert close(use["entropy_bits"], exact["entropy_bits"])
    for one, exact in zip(page["overflow"], plain["overflow"], strict=True):
        assert [one[name] for name in ("format", "above", "below_scaled", "above_severity")] == [
            exact[name] for name in ("format", "above", "below_scaled", "above_severity")
        ]


def test_the_text_prints_the_numbers_of_the_document(plain: dict[str, Any]) -> None:
    lines = list(report_lines(plain))

    def row(header: str, *first: str) -> list[str]:
        """The cells of a table's row, by the beginnings of its header and of itself."""
        at = next(place for place, line in enumerate(lines) if line.startswith(header))
        return next(line.split() for line in lines[at:] if line.split()[: len(first)] == [*first])

    for one in grouped(plain, BY_LAYER):
        found = row("quant_type  tensor_name  layer", "bf16", "input", str(one["layer"]))
        assert found[6:11] == [f"{one[name]:.6g}" for name in ("min", "max", "absmax", "mean", "std")]
    [group] = grouped(plain, BY_TENSOR)
    for label, errors in group["errors"].items():
        found = row("error of", "bf16", "input", label)
        assert found[4:7] == [f"{errors['sqnr_db']:.2f}", f"{100 * errors['relative']:.4g}", "%"]
    [use] = plain["hifp8"]
    assert row("HiFP8 of", "bf16", "all")[2] == f"{use['finite']:,}"
    for one in plain["overflow"]:
        assert row("overflow of", "bf16", one["format"])[2] == f"{100 * one['above'] / one['count']:.4g}"


def test_the_verdict_is_in_the_document_the_text_and_the_page(
    plain: dict[str, Any], gathered: GatheredRecords
) -> None:
    verdict, lines = plain["verdict"], list(report_lines(plain))
    page = page_data(plain, gathered, files=True, choices=FORMATS)

    assert [one["format"] for one in verdict["formats"]] == ["mxfp8", "hifp8"]
    assert [one["text"] for one in verdict["statements"]] == lines[lines.index("") + 1 :][
        : len(verdict["statements"])
    ]
    for one, shown in zip(verdict["formats"], page["verdict"]["formats"], strict=True):
        errors = one["roles"]["activations"]
        assert close(shown["roles"]["activations"]["tenth_sqnr_db"], errors["tenth_sqnr_db"])
        [row] = [line for line in lines if line.split()[:2] == ["activations", one["format"]]]
        levels = [errors[name] for name in ("tenth_sqnr_db", "median_sqnr_db", "sqnr_db")]
        assert row.split()[4:7] == [f"{level:.2f}" for level in levels]
    assert [one["place"] for one in page["verdict"]["worst"]] == [
        [series["path"] for series in page["series"]].index(one["series"]) for one in verdict["worst"]
    ]


def test_without_formats_there_is_no_verdict() -> None:
    plain = document(["run.zarr"], GatheredRecords(), quick=True)

    assert plain["verdict"] == {"formats": [], "best": {}, "statements": [], "worst": [], "calls": None}
    assert not any(line.startswith("verdict") for line in report_lines(plain))


def test_what_is_not_finite_has_a_name_in_json_and_on_the_page(plain: dict[str, Any]) -> None:
    assert json.loads(json_text({"a": [math.nan, -math.inf]})) == {"a": ["NaN", "-Infinity"]}
    assert rounded({"a": [math.nan, math.inf, 2.0, 0.123456, 7, None, "x", True]}) == {
        "a": ["NaN", "Infinity", 2, 0.1235, 7, None, "x", True]
    }
    assert isinstance(rounded(2.0), int)
    assert rounded(1e30) == 1e30
