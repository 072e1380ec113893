"""The page's data: its numbers against the same values through numpy and capd.formats, and what is left out of many."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from importlib.resources import files
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from capd.analyze.format_choice import FormatChoice, choices
from capd.formats import qdq
from capd.io.items import Item, Loaded
from capd.report.document import document
from capd.report.gather import GatheredRecords, gather
from capd.report.page.data import page_data
from capd.report.page.plain import METRICS
from capd.report.page.scalars_data import scalars_data
from capd.report.quantiles import QUANTILES
from capd.report.series import MOST_SERIES, SeriesSummaries
from capd.store.format.statistics import public, summarise
from capd_client.protocol.key import Key, Moment

CHOICES = choices("mxfp8,hifp8")
TYPES, RANKS, LAYERS, ITERATIONS = ("bf16", "hifp8"), (0, 1), (0, 1), (0, 1, 2)
Values = dict[tuple[Any, ...], np.ndarray]


def item(name: str, key: Key, values: np.ndarray, moment: Moment, **attributes: Any) -> Item:
    stats = public(summarise(values, "float32"))
    loaded = Loaded(
        key, moment, "float32", values.nbytes, stats, lambda: values, attributes, values.shape
    )  # fmt: skip
    return Item(name, values.nbytes, lambda: loaded)


def known() -> tuple[list[Item], Values]:
    rng, items, values = np.random.default_rng(5), [], {}
    for one, rank, layer, name in product(TYPES, RANKS, LAYERS, ("input", "weight")):
        key = Key(quant_type=one, rank=rank, layer=layer, tensor_name=name)
        for iteration in ITERATIONS:
            found = (rng.normal(size=(4, 64)) * 2.0 ** (8 * layer)).astype(np.float32)
            values[one, rank, layer, name, iteration] = found
            items.append(
                item(f"{one}/{rank}/{layer}/{name}#{iteration}", key, found, Moment(iteration=iteration),
                     emulation="none" if one == "bf16" else '{"linear":"hifp8"}')
            )  # fmt: skip
    return items, values


def data_of(
    items: Iterable[Item], *, quick: bool = False, formats: tuple[FormatChoice, ...] = CHOICES
) -> dict[str, Any]:
    gathered = GatheredRecords(series=SeriesSummaries())
    for _ in gather(
        items, gathered, threads=2, quick=quick, choices=() if quick else formats, channels=not quick
    ):
        pass
    plain = document(["runs/some.zarr"], gathered, quick=quick)
    found = page_data(plain, gathered, files=True, choices=formats)
    return json.loads(json.dumps(found, allow_nan=False))  # strict JSON


@pytest.fixture(scope="module")
def shown() -> tuple[dict[str, Any], Values]:
    items, values = known()
    return data_of(items), values


def test_each_series_has_its_statistics_its_moments_and_its_emulation(
    shown: tuple[dict[str, Any], Values],
) -> None:
    data, values = shown
    assert data["series_total"] == len(data["series"]) == len(values) // len(ITERATIONS)
    for series in data["series"]:
        place = series["quant_type"], series["rank"], series["layer"], series["tensor_name"]
        own = [values[(*place, iteration)] for iteration in ITERATIONS]
        together = np.stack(own).astype(np.float64)
        assert series["path"] == "/".join(map(str, place))
        assert (series["records"], series["shape"], series["count"]) == (3, [4, 64], together.size)
        assert series["absmax"] == pytest.approx(np.abs(together).max(), rel=1e-3)
        assert series["std"] == pytest.approx(together.std(), rel=1e-3)
        assert series["quantiles"][5] == pytest.approx(
            np.quantile(together, 0.5), abs=2e-2 * np.abs(together).max()
        )
        assert series["moments"]["iteration"] == list(ITERATIONS)
        assert series["moments"]["absmax"] == pytest.approx([np.abs(one).max() for one in own], rel=1e-3)
        assert data["emulations"][series["emulation"]] == (
            "none" if place[0] == "bf16" else '{"linear":"hifp8"}'
        )


def test_errors_of_cells_are_those_of_all_their_records(shown: tuple[dict[str, Any], Values]) -> None:
    data, values = shown
    assert data["formats"] == ["mxfp8", "hifp8"]
    assert data["metrics"] == list(METRICS)
    for cell in data["cells"]:
        own = [
            found for (one, _, layer, name, _), found in values.items()
            if (one, layer, name) == (cell["quant_type"], cell["layer"], cell["tensor_name"])
        ]  # fmt: skip
        for fmt in ("mxfp8", "hifp8"):
            x = torch.from_numpy(np.stack(own))
            d = qdq(x, fmt).double() - x.double()
            sqnr = 10 * torch.log10(x.double().square().sum() / d.square().sum())
            assert cell["errors"][fmt][0] == pytest.approx(float(sqnr), rel=1e-3)


def test_exponents_count_every_value_that_is_not_zero(shown: tuple[dict[str, Any], Values]) -> None:
    data, values = shown
    for one in data["distributions"]:
        own = np.concatenate(
            [
                found.ravel() for named, found in values.items()
                if (named[0], named[3]) == (one["quant_type"], one["tensor_name"])
            ]
        )  # fmt: skip
        first, *counts = one["exponents"]
        exponents = np.frexp(own[own != 0])[1] - 1
        assert counts == np.bincount(exponents - first).tolist()


def test_types_say_what_they_hold_and_what_was_emulated(shown: tuple[dict[str, Any], Values]) -> None:
    data, _ = shown
    said = [
        (one["quant_type"], one["series"], one["layers"], one["ranks"], one["iterations"])
        for one in data["types"]
    ]
    assert said == [("bf16", 8, 2, 2, 3), ("hifp8", 8, 2, 2, 3)]
    assert [one["emulations"] for one in data["types"]] == [["none"], ['{"linear":"hifp8"}']]
    assert {one["quant_type"] for one in data["hifp8_groups"]["rank"]} == {"hifp8"}


def test_hifp8_has_a_whole_and_each_type_and_its_regimes_count_all(
    shown: tuple[dict[str, Any], Values],
) -> None:
    data, values = shown
    assert [one["quant_type"] for one in data["hifp8"]] == [None, "bf16", "hifp8"]
    for one in data["hifp8"]:
        assert sum(regime["count"] for regime in one["regimes"]) == one["finite"] == sum(one["codes"])
    assert data["hifp8"][0]["finite"] == sum(found.size for found in values.values())


def test_quick_shows_what_is_stored_and_has_no_section_that_needs_elements() -> None:
    data = data_of(known()[0], quick=True)
    assert data["quick"] is True
    assert (data["formats"], data["boxes"], data["channels"], data["hifp8"], data["overflow"]) == (
        [],
        [],
        [],
        [],
        [],
    )
    assert all(series["quantiles"] is None and series["exponents"] for series in data["series"])
    assert all(cell["errors"] == {} and cell["std"] for cell in data["cells"])


def test_channels_show_the_outlier_at_its_place() -> None:
    values = np.ones((64, 300), np.float32)
    values[3, 217] = 1000.0
    data = data_of([item("one#0", Key(quant_type="bf16", rank=0, tensor_name="x"), values, Moment())])
    [channels] = data["channels"]
    assert (channels["channels"], channels["entries_per_point"], len(channels["amax"])) == (300, 2, 150)
    assert channels["amax"][217 // 2] == 1000
    assert channels["largest"][0] == [217, 1000, 1]


def test_records_of_one_series_that_come_apart_are_merged_and_have_no_quantiles() -> None:
    rng = np.random.default_rng(1)
    keys = [Key(quant_type="bf16", rank=0, tensor_name=name) for name in ("a", "b")]
    parts = [(key, rng.normal(size=32).astype(np.float32)) for _ in range(2) for key in keys]
    data = data_of(item(f"{at}.pt", key, values, Moment()) for at, (key, values) in enumerate(parts))
    assert [(one["tensor_name"], one["records"], one["path"]) for one in data["series"]] == [
        ("a", 2, "0.pt"), ("b", 2, "1.pt"),
    ]  # fmt: skip
    assert [one["quantiles"] for one in data["series"]] == [None, None]
    assert [one["outlier"] for one in data["series"]] == [None, None]
    assert data["series"][0]["absmax"] == pytest.approx(np.abs([parts[0][1], parts[2][1]]).max(), rel=1e-3)


def test_what_is_too_much_for_one_page_is_left_out_and_said() -> None:
    def many() -> Iterator[Item]:
        values = np.ones(4, np.float32)
        for number in range(MOST_SERIES + 5):
            key = Key(quant_type="bf16", rank=0, tensor_name="x", module=f"m{number}")
            for iteration in range(200 if number == 0 else 1):
                yield item(f"m{number}#{iteration}", key, values, Moment(iteration=iteration))

    data = data_of(many(), formats=())
    assert (len(data["series"]), data["series_total"]) == (MOST_SERIES, MOST_SERIES + 5)
    assert data["all"]["records"] == MOST_SERIES + 5 + 199  # the groups are of all
    first = data["series"][0]
    assert len(first["moments"]["iteration"]) <= 10 < first["records"]
    assert first["moments"]["iteration"] == list(range(0, 200, first["moments_step"]))
    assert {"about": "series", "found": MOST_SERIES + 5, "shown": MOST_SERIES} in data["notes"]
    assert {"records"} <= {note["about"] for note in data["notes"]}
    assert len(first["spread"]["shares"]) <= 2


def test_each_note_has_a_text_on_the_page() -> None:
    source = "".join(
        (files("capd.report") / "page" / f"{name}.py").read_text()
        for name in ("group_data", "series_data", "scalars_data", "alerts_data", "replay_data")
    )
    texts = (files("capd.report") / "assets" / "sections" / "overview.js").read_text(encoding="utf-8")
    written, known = (
        set(re.findall(pattern, text))
        for pattern, text in ((r'"about": "(\w+)"', source), (r"(\w+): word\(", texts))
    )
    assert written == known


def test_the_shares_by_exponent_are_those_of_each_iteration(shown: tuple[dict[str, Any], Values]) -> None:
    data, values = shown
    for line in data["iterations"]:
        assert line["spread"]["iteration"] == list(ITERATIONS)
        for iteration, (first, *shares) in zip(ITERATIONS, line["spread"]["shares"], strict=True):
            own = np.concatenate(
                [
                    found.ravel() for named, found in values.items()
                    if (named[0], named[3], named[4]) == (line["quant_type"], line["tensor_name"], iteration)
                ]
            )  # fmt: skip
            counts = np.bincount(np.frexp(own[own != 0])[1] - 1 - first)
            expected = [max(round(10_000 * one / counts.sum()), one > 0) for one in counts]
            assert shares == expected


def test_boxes_and_overflow_of_a_tensor_are_of_its_own_values(shown: tuple[dict[str, Any], Values]) -> None:
    data, values = shown
    assert len(data["tensor_boxes"]) == 2 * 2 * 2
    for box in data["tensor_boxes"]:
        own = np.stack(
            [
                found for (one, _, layer, name, _), found in values.items()
                if (one, layer, name) == (box["quant_type"], box["layer"], box["tensor_name"])
            ]
        )  # fmt: skip
        expected = np.quantile(own.astype(np.float64), QUANTILES)
        assert box["quantiles"] == pytest.approx(expected.tolist(), rel=1 / 32 + 1e-3, abs=2.0**-7)
    for row in data["tensor_overflow"]:
        found = [
            one
            for named, one in values.items()
            if (named[0], named[3]) == (row["quant_type"], row["tensor_name"])
        ]
        own = torch.from_numpy(np.stack(found)).bfloat16().abs().double()  # distributions count float32 so
        if row["format"] == "e4m3":
            assert (row["count"], row["above"]) == (own.numel(), int((own > 448).sum()))
            assert row["flushed"] == int(((own > 0) & (own < 2.0**-6)).sum())


def test_each_series_says_how_far_its_largest_channel_sticks_out(
    shown: tuple[dict[str, Any], Values],
) -> None:
    data, values = shown
    for series in data["series"]:
        place = series["quant_type"], series["rank"], series["layer"], series["tensor_name"]
        amax = np.abs([values[(*place, iteration)] for iteration in ITERATIONS]).max(axis=(0, 1))
        channels, ratio, _, channel, largest = series["outlier"]
        assert (channels, channel) == (64, int(amax.argmax()))
        assert largest == pytest.approx(amax.max(), rel=1e-3)
        assert ratio == pytest.approx(amax.max() / np.median(amax), rel=1e-3)


def test_a_long_scalar_keeps_its_spikes_its_nans_and_its_last_step() -> None:
    values = [1.0] * 10_000
    values[4321], values[777] = 1e6, math.nan
    line = {"name": "loss", "iteration": list(range(10_000)), **dict.fromkeys(("mean", "min", "max"), values)}

    [drawn] = scalars_data({"scalars": [line]}, [])

    assert len(drawn["iteration"]) == 400
    assert drawn["iteration"][-1] == 9999
    assert max(drawn["max"]) == 1_000_000
    assert drawn["mean"].count("NaN") == 1
    assert drawn["iteration"][drawn["mean"].index("NaN")] - 777 in range(25)
