"""What a reader chooses on the report's page: a tensor, an axis, a language; and what few or many records look like."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capd.cli.app import main
from capd.formats import qdq
from capd_client.protocol.key import Moment
from tests.browser.conftest import Opened
from tests.browser.test_report_page import PAGES, number
from tests.kit.store.cli import StoreWriter, bf16_bits, linear_key

Open = Callable[..., Opened]
Values = dict[tuple[Any, ...], np.ndarray]
TYPES, LAYERS, TENSORS, ITERATIONS = ("bf16", "mxfp8"), (0, 1, 2), ("input", "grad_output"), (0, 1, 2, 7)
RECIPE = '{"linear":{"backward":"same","block":32,"elem":"e4m3","format":"mxfp8"},"pv":"none","qk":"none"}'
OUTLIER = 5
# Remembers each chart of uPlot that is drawn from now on.
RECORD = """() => { window.plots = []; const before = window.uPlot;
    window.uPlot = new Proxy(before, { construct(target, given) {
        const made = new target(...given); plots.push(made); return made; } }); }"""


def name_of(layer: int, tensor: str) -> str:
    return f"model.decoder.layers.{layer}.self_attention.linear_{'proj' if tensor == 'input' else 'qkv'}"


def written(root: Path, run: str, types: tuple[str, ...], iterations: tuple[int, ...]) -> tuple[Path, Values]:
    """A run with long names of modules, gradients that shrink, and a channel that sticks out; and its values."""
    rng, values, writer = np.random.default_rng(8), {}, StoreWriter(root)
    for one, layer, tensor, iteration in product(types, LAYERS, TENSORS, iterations):
        scale = 1e-4 * 10.0**-iteration if tensor == "grad_output" else 1.0 + layer
        found = rng.normal(scale=scale, size=(16, 64))
        found[:, OUTLIER] *= 1 + 20 * layer
        bits = bf16_bits(found)
        values[one, layer, tensor, iteration] = (bits.astype(np.uint32) << 16).view(np.float32)
        key = linear_key(quant_type=one, layer=layer, tensor_name=tensor, module=name_of(layer, tensor))
        more = {"attributes": {"emulation": RECIPE}} if one == "mxfp8" else {}
        writer.put(run, key, bits, "bfloat16", Moment(iteration=iteration, sample_idx=0, time_ns=1), **more)
    writer.close()
    return root / f"{run}.zarr", values


def report(out: Path, *stores: Path | str) -> Path:
    with pytest.raises(SystemExit) as end:
        main(["report", *map(str, stores), "-o", str(out), "--formats", "mxfp8,hifp8", "--workers", "1"])
    assert not end.value.code
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Values]:
    """A report, and the values of its run by (quant type, layer, tensor, iteration)."""
    root = tmp_path_factory.mktemp("runs")
    store, values = written(root, "run", TYPES, ITERATIONS)
    return report(root / "report.html", store), values


def of_tensor(values: Values, one: str, tensor: str, layer: int | None = None) -> np.ndarray:
    return np.stack(
        [
            found
            for (each, at, name, _), found in values.items()
            if (each, name) == (one, tensor) and layer in (None, at)
        ]
    )


def rows_of(shown: Opened, place: int = 0) -> list[dict[str, str]]:
    """The rows of the place-th table of the page, by their columns."""
    table = shown.page.locator("main .table table").nth(place)
    heads = table.locator("thead th").all_inner_texts()
    return [
        dict(zip(heads, row.locator("td").all_text_contents(), strict=True))
        for row in table.locator("tbody tr").all()
    ]


def test_the_boxes_of_a_tensor_are_its_own_quantiles(opened: Open, made: tuple[Path, Values]) -> None:
    shown = opened(made[0])
    shown.go("layers")
    assert shown.page.locator(".boxes rect").count() == len(TYPES) * len(LAYERS)
    shown.choose("tensor", "grad_output")
    shown.unfold()
    found = rows_of(shown)
    assert len(found) == len(TYPES) * len(LAYERS)
    for row in found:
        own = of_tensor(made[1], row["quant type"], "grad_output", int(row["layer"])).astype(np.float64)
        assert number(row["std"]) == pytest.approx(own.std(), rel=1e-3)
        for share in (0.01, 0.25, 0.75, 0.99):
            expected = np.quantile(own, share)
            assert number(row[f"q {share}"]) == pytest.approx(expected, rel=1 / 32 + 1e-3)


def test_the_overflow_of_a_tensor_counts_its_own_values(opened: Open, made: tuple[Path, Values]) -> None:
    shown = opened(made[0])
    shown.go("overflow")
    shown.choose("tensor", "grad_output")
    for row in rows_of(shown):
        own = np.abs(of_tensor(made[1], row["quant type"], "grad_output").astype(np.float64))
        if row["format"] == "e4m3":
            assert int(row["below"].replace(",", "")) == ((own > 0) & (own < 2.0**-9)).sum() > 0
            assert int(row["values"].replace(",", "")) == own.size


def test_a_cell_of_tensors_by_format_is_the_error_on_all_of_the_tensor(
    opened: Open, made: tuple[Path, Values]
) -> None:
    shown = opened(made[0])
    shown.go("errors")
    heat = shown.page.locator("main section").nth(1).locator(".heat")
    assert heat.locator("thead th").all_inner_texts() == ["tensor", "mxfp8", "hifp8"]
    for row in heat.locator("tbody tr").all():
        x = torch.from_numpy(of_tensor(made[1], "bf16", row.locator("th").inner_text())).bfloat16()
        for fmt, cell in zip(("mxfp8", "hifp8"), row.locator("td").all_inner_texts(), strict=True):
            d = qdq(x, fmt).double() - x.double()
            expected = 10 * torch.log10(x.double().square().sum() / d.square().sum())
            assert float(cell) == pytest.approx(float(expected), rel=1e-3)


def test_an_outlier_names_its_module_and_leads_to_its_page(opened: Open, made: tuple[Path, Values]) -> None:
    shown = opened(made[0])
    shown.go("outliers")
    first = rows_of(shown, 1)[0]
    assert first["layer"] == "2"
    assert (first["module"], first["largest channel"]) == (name_of(2, first["tensor"]), str(OUTLIER))
    own = np.abs(of_tensor(made[1], first["quant type"], first["tensor"], 2)).max(axis=(0, 1))
    assert number(first["ratio"]) == pytest.approx(own.max() / np.median(own), rel=1e-3)
    link = shown.page.locator("main .links a").first
    module = link.locator("bdi").text_content()
    link.click()
    shown.page.wait_for_selector("main .facts")
    assert module in shown.page.locator("main .facts dd bdi").all_text_contents()


def test_the_heat_over_iterations_has_the_shares_of_each_binade(
    opened: Open, made: tuple[Path, Values]
) -> None:
    shown = opened(made[0])
    data = json.loads(shown.page.locator("#data").text_content())
    place = next(
        at for at, one in enumerate(data["series"])
        if (one["quant_type"], one["layer"], one["tensor_name"]) == ("bf16", 1, "grad_output")
    )  # fmt: skip
    shown.go(f"tensor/{place}")
    cells = shown.page.locator("main .boxes rect title").all_text_contents()
    seen: dict[str, float] = {}
    for cell in cells:
        where, share = cell.split(": ")
        seen[where] = float(share.removesuffix(" %"))
    expected = {}
    for iteration in ITERATIONS:
        own = made[1]["bf16", 1, "grad_output", iteration]
        exponents, counts = np.unique(np.frexp(own[own != 0])[1] - 1, return_counts=True)
        for exponent, count in zip(exponents, counts, strict=True):
            raised = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
            expected[f"iteration {iteration}, 2{raised}"] = 100 * count / counts.sum()
    assert seen == pytest.approx(expected, abs=0.006)


def test_gradients_are_on_a_logarithmic_axis_until_another_is_chosen(
    opened: Open, made: tuple[Path, Values]
) -> None:
    shown = opened(made[0])
    shown.page.evaluate(RECORD)
    shown.go("iterations")

    def scale() -> int:
        return int(shown.page.evaluate("plots.at(-1).scales.y.distr"))

    shown.choose("tensor", "grad_output")
    assert scale() == 3
    shown.choose("statistic", "mean")
    assert scale() == 4  # of both signs
    shown.choose("value axis", "linear")
    assert scale() == 1
    shown.choose("value axis", "logarithmic for gradients")
    shown.choose("tensor", "input")
    assert scale() == 1


@pytest.mark.parametrize("width", [1280, pytest.param(400, marks=pytest.mark.slow)])
def test_titles_of_axes_keep_off_the_numbers(opened: Open, made: tuple[Path, Values], width: int) -> None:
    shown = opened(made[0], width=width)
    shown.page.evaluate(RECORD)
    for place in ("distributions", "hifp8", "iterations", "outliers"):
        shown.go(place)
    wanting = """plots.flatMap((plot) => plot.axes.filter((axis) => axis.side % 2).map((axis) => {
        plot.ctx.font = axis.font[0];
        const widest = Math.max(...axis._values.map((mark) => plot.ctx.measureText(mark ?? "").width));
        return axis._size - widest / devicePixelRatio; }))"""
    assert min(shown.page.evaluate(wanting)) >= 10
    shown.go("layers")
    boxes = """[...document.querySelectorAll("svg.boxes text")].map((text) => {
        const { left, right } = text.getBoundingClientRect();
        return [text.hasAttribute("transform"), left, right]; })"""
    found = shown.page.evaluate(boxes)
    [title] = [right for turned, _, right in found if turned]
    assert title <= min(left for turned, left, _ in found if not turned)


@pytest.mark.parametrize("width", [1280, pytest.param(1600, marks=pytest.mark.slow)])
def test_tables_fit_and_long_names_lose_their_middle_alone(
    opened: Open, made: tuple[Path, Values], width: int
) -> None:
    shown = opened(made[0], width=width)
    for place in (*PAGES, "tensor/0"):
        shown.go(place)
        wide = """[...document.querySelectorAll(".table .scroller")]
            .filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.ariaLabel)"""
        assert shown.page.evaluate(wide) == [], place
    shown.go("tensors")
    cell = shown.page.locator("main tbody td").first
    assert cell.evaluate("(one) => getComputedStyle(one).position") == "sticky"
    name = cell.locator("bdi")
    assert name.get_attribute("title") == name.text_content() == f"{name_of(0, 'input')}.input"
    assert name.locator(".tail").inner_text() == name.text_content()[-20:]
    assert shown.page.locator("main table").first.bounding_box()["width"] > width - 60


def test_one_step_is_bars_with_their_numbers(opened: Open, tmp_path: Path) -> None:
    store, values = written(tmp_path, "one", TYPES, (7,))
    shown = opened(report(tmp_path / "one.html", store))
    shown.go("iterations")
    shown.choose("tensor", "input")
    assert shown.page.locator("main .uplot").count() == 0
    found = dict(
        zip(
            shown.page.locator(".bars th").all_inner_texts(),
            shown.page.locator(".bars td.number").all_inner_texts(),
            strict=True,
        )
    )
    for one in TYPES:
        assert number(found[one]) == pytest.approx(
            of_tensor(values, one, "input").std(dtype=np.float64), rel=1e-3
        )
    assert "iteration 7" in shown.page.locator(".bars caption").inner_text()


def test_several_runs_stand_side_by_side(opened: Open, made: tuple[Path, Values], tmp_path: Path) -> None:
    store = made[0].with_name("run.zarr")
    other, values = written(tmp_path, "other", ("bf16",), (0, 1))
    shown = opened(report(tmp_path / "both.html", store, other))
    assert shown.text("h1") == "capd report run, other"
    assert shown.text("main .note") == "The verdict is on the records of 2 runs together: run, other."
    assert {row["tensor"].split("/")[0] for row in rows_of(shown)} == {"run", "other"}
    shown.go("overview")
    assert [row["quant type"] for row in rows_of(shown)] == ["other: bf16", "run: bf16", "run: mxfp8"]
    ledger = rows_of(shown, 1)
    assert [row["run"].rpartition("/")[2] for row in ledger] == ["run.zarr", "other.zarr"]
    shown.go("layers")
    shown.choose("tensor", "input")
    shown.choose("quant type", "other: bf16")
    shown.unfold()
    for row in rows_of(shown):
        own = of_tensor(values, "bf16", "input", int(row["layer"]))
        assert number(row["std"]) == pytest.approx(own.std(dtype=np.float64), rel=1e-3)


def test_an_emulation_is_words(opened: Open, made: tuple[Path, Values]) -> None:
    shown = opened(made[0])
    shown.go("overview")
    said = shown.page.locator("main dl dd[title]").all_inner_texts()
    assert said == [
        "not said",
        "linears: mxfp8 (e4m3, blocks of 32); attention's scores, attention's output: not emulated",
    ]


def english() -> set[str]:
    """The strings of the page that have words and another Chinese."""
    table = (files("capd.report") / "assets" / "words.js").read_text(encoding="utf-8")
    pairs = re.findall(r'^  ("(?:[^"\\]|\\.)*"): ("(?:[^"\\]|\\.)*"),$', table, re.MULTILINE)
    return {
        json.loads(text)
        for text, other in pairs
        if text != other and re.search("[A-Za-z]{3}", text) and "{" not in text
    } - {"tensor", "none", "linear"}  # also names in the store


def test_the_page_speaks_chinese_and_remembers_it(opened: Open, made: tuple[Path, Values]) -> None:
    shown = opened(made[0])
    shown.choose("language", "中文")
    texts = """[...document.querySelectorAll("body *:not(script, style, noscript)")].flatMap((one) => [
        ...[...one.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data.trim()),
        one.ariaLabel ?? "", one.placeholder ?? ""])"""
    for place in (*PAGES, "tensor/0", "tensor/9999"):
        shown.go(place)
        assert english() & set(shown.page.evaluate(texts)) == set(), place
    assert shown.page.evaluate("document.documentElement.lang") == "zh-Hans"
    shown.page.reload()
    shown.page.wait_for_selector("main section")
    assert shown.page.locator("nav a").first.inner_text() == "总结"
    shown.choose("语言", "English")
    assert shown.page.locator("nav a").first.inner_text() == "Summary"
