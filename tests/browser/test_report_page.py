"""The report's page in a real browser: it opens offline, obeys the keyboard, and tells the store's numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import capd
from capd.analyze.format_choice import DEFAULT_CHOICES
from capd.formats import qdq
from capd.io.items import Item, Loaded
from capd.report.document import document
from capd.report.gather import GatheredRecords, gather
from capd.report.page.data import page_data
from capd.report.page.html import page_html
from capd.report.series import MOST_SERIES, SeriesSummaries
from capd.store.format.statistics import public, summarise
from capd_client.protocol.key import Moment
from tests.browser.conftest import Opened
from tests.kit.store.alerting import alert, give_alerts
from tests.kit.store.cli import StoreWriter, bf16_bits, linear_key
from tests.kit.store.scalars import write_scalars
from tests.kit.tiers import rows

Open = Callable[..., Opened]
Values = dict[tuple[Any, ...], np.ndarray]
PAGES = (
    "summary",
    "overview",
    "errors",
    "distributions",
    "layers",
    "outliers",
    "iterations",
    "hifp8",
    "overflow",
    "tensors",
)
HOSTILE = "</script><img src=x onerror=alert(1)>"
LONG = "n" * 300
RTL, QUOTES = "\u202eمرحبا 🎉", "\"'`${alert(2)}"
TYPES, RANKS, LAYERS = ("bf16", "hifp8"), (0, 1), (0, 1, 2, None)
TENSORS = ("input", HOSTILE, RTL, QUOTES)
ITERATIONS, WIDTH = (0, 1, 2), 32
FOCUSABLE = "a[href], button:not([disabled]), select, input, summary, [tabindex='0']"


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Values]:
    """A run with hostile names, and its values by (quant type, rank, layer, tensor, iteration)."""
    root, rng, values = tmp_path_factory.mktemp("runs"), np.random.default_rng(4), {}
    writer = StoreWriter(root)
    for one, rank, layer, tensor, iteration in product(TYPES, RANKS, LAYERS, TENSORS, ITERATIONS):
        bits = bf16_bits(rng.normal(scale=2.0 ** (2 * (layer or 0)), size=(4, WIDTH)))
        values[one, rank, layer, tensor, iteration] = (bits.astype(np.uint32) << 16).view(np.float32)
        key = linear_key(
            quant_type=one, rank=rank, layer=layer, tensor_name=tensor, module=f"m.{layer}.{tensor}"
        )
        writer.put("run", key, bits, "bfloat16", Moment(iteration=iteration, sample_idx=iteration, time_ns=1))
    writer.close()
    path = capd.open(root / "run.zarr").series[0].path
    give_alerts(
        root / "run.zarr",
        "node0",
        alert(1, rule=HOSTILE, series=path, text=RTL),
        alert(2, rule=LONG, series="", severity="critical", text=QUOTES),
    )
    return root / "run.zarr", values


def report(store: Path, out: Path, *more: str) -> Path:
    command = [sys.executable, "-m", "capd", "report", str(store), "-o", str(out), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return out


@pytest.fixture(scope="module")
def page(known: tuple[Path, Values], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(known[0], tmp_path_factory.mktemp("page") / "report.html", "--workers", "2")


@pytest.fixture(scope="module")
def quick_page(known: tuple[Path, Values], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(known[0], tmp_path_factory.mktemp("page") / "quick.html", "--quick")


@pytest.mark.parametrize(
    ("width", "theme"),
    [
        (1280, "light"),
        (400, "dark"),
        pytest.param(1280, "dark", marks=pytest.mark.slow),
        pytest.param(400, "light", marks=pytest.mark.slow),
    ],
)
def test_every_page_opens_offline_and_none_scrolls_sideways(
    opened: Open, page: Path, width: int, theme: str
) -> None:
    shown = opened(page, width=width, theme=theme)
    for place in (*PAGES, "tensor/0", "tensor/5"):
        shown.go(place)
        assert shown.page.evaluate("document.documentElement.scrollWidth") == width, place
        assert shown.page.locator("main h2").count() >= 1
        empty = "[...document.querySelectorAll('.scroller')].filter((each) => !each.children.length).length"
        assert shown.page.evaluate(empty) == 0, place


def test_names_of_the_store_are_text_and_nothing_else(opened: Open, page: Path) -> None:
    shown = opened(page)
    for place in (*PAGES, *(f"tensor/{number}" for number in range(len(TENSORS)))):
        shown.go(place)
        assert shown.page.locator("main img").count() == 0
    shown.go("errors")
    names = shown.page.locator("main .heat >> nth=0").locator("thead bdi").all_text_contents()
    assert sorted(names) == sorted(TENSORS)


def test_the_alerts_of_the_run_are_a_table_in_the_language_that_is_chosen(opened: Open, page: Path) -> None:
    shown = opened(page)
    shown.go("overview")
    rows = shown.page.locator("section:has(h2:text-is('Alerts')) tbody tr")
    assert [row.split("\t")[1] for row in rows.all_inner_texts()] == ["warning", "critical"]
    assert HOSTILE in rows.first.inner_text()
    assert shown.page.locator("main img").count() == 0
    shown.choose("language", "中文")
    assert "严重" in shown.page.locator("section:has(h2:text-is('警报')) tbody tr").last.inner_text()
    shown.page.locator("section:has(h2:text-is('警报')) a").first.click()
    assert "#tensor/" in shown.page.url


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_names_of_300_characters_wrap_instead_of_scrolling_the_page(
    opened: Open, tmp_path: Path, width: int
) -> None:
    writer, out = StoreWriter(tmp_path), tmp_path / "long.html"
    for iteration in ITERATIONS:
        bits = bf16_bits(np.random.default_rng(iteration).normal(size=(4, WIDTH)))
        for layer in (0, 1):  # of two series, so that the report opens on its overview
            key = linear_key(quant_type="bf16", layer=layer, tensor_name=LONG, module=LONG)
            writer.put("run", key, bits, "bfloat16", Moment(iteration=iteration, sample_idx=0, time_ns=1))
    writer.close()
    shown = opened(report(tmp_path / "run.zarr", out), width=width)
    for place in (*PAGES, "tensor/0"):
        shown.go(place)
        assert shown.page.evaluate("document.documentElement.scrollWidth") == width, place


@pytest.mark.parametrize("quick", rows([False, True], [True]))
def test_every_page_of_a_report_of_nothing_says_so(opened: Open, tmp_path: Path, quick: bool) -> None:
    out = tmp_path / "empty.html"
    plain = document(["run.zarr"], GatheredRecords(), quick=quick)
    out.write_bytes(page_html(page_data(plain, GatheredRecords(), files=True)))
    shown = opened(out, width=400)
    for place in (*PAGES, "tensor/0"):
        shown.go(place)
        assert shown.page.locator("main .nothing").count() >= 1, place
        assert shown.page.locator("main .uplot").count() == 0, place


@pytest.mark.slow
def test_what_is_printed_is_light_and_the_choices_stay(opened: Open, page: Path) -> None:
    shown = opened(page, theme="dark")
    shown.go("iterations")
    shown.choose("statistic", "mean")
    ink = """() => { const plot = document.querySelector(".uplot canvas");
        const copy = Object.assign(document.createElement("canvas"), { width: plot.width, height: plot.height });
        const drawn = copy.getContext("2d", { willReadFrequently: true });
        drawn.drawImage(plot, 0, 0);
        const { data } = drawn.getImageData(0, 0, plot.width, plot.height);
        const seen = new Set();
        for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) seen.add(data.slice(at, at + 3).join());
        return ["28,30,33", "230,232,235"].map((text) => seen.has(text)); }"""
    found = [shown.page.evaluate(ink)]
    for event in ("beforeprint", "afterprint"):
        shown.page.evaluate(f"dispatchEvent(new Event('{event}'))")
        shown.settle()
        found.append(shown.page.evaluate(ink))
    assert found == [
        [False, True],
        [True, False],
        [False, True],
    ]  # the axes' text: of the light theme, of the dark
    assert shown.page.get_by_label("statistic", exact=True).first.input_value() == "mean"


@pytest.mark.slow
def test_the_keyboard_reaches_everything_that_can_be_pressed(opened: Open, page: Path) -> None:
    shown = opened(page, width=400)
    for place in (*PAGES, "tensor/0"):
        shown.go(place)
        total = shown.page.locator(FOCUSABLE).count()
        shown.page.evaluate(
            "window.reached = new Set(); document.activeElement.blur(); document.querySelector('.skip').focus()"
        )
        for _ in range(total + 2):
            shown.page.evaluate("window.reached.add(document.activeElement)")
            shown.page.keyboard.press("Tab")
        missed = """(all) => [...document.querySelectorAll(all)].filter((each) => !window.reached.has(each))
            .map((each) => each.outerHTML.slice(0, 90))"""
        assert shown.page.evaluate(missed, FOCUSABLE) == [], place


@pytest.mark.slow
def test_enter_on_a_page_of_the_menu_goes_there_and_takes_the_focus_along(opened: Open, page: Path) -> None:
    shown = opened(page)
    shown.page.get_by_role("link", name="HiFP8", exact=True).focus()
    shown.page.keyboard.press("Enter")
    shown.page.wait_for_selector("h2:has-text('HiFP8')")
    assert shown.page.evaluate("[location.hash, document.activeElement.tagName]") == ["#hifp8", "MAIN"]
    assert shown.page.locator("nav [aria-current]").inner_text() == "HiFP8"


@pytest.mark.slow
def test_the_theme_follows_the_system_until_it_is_chosen(opened: Open, page: Path) -> None:
    shown = opened(page, theme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = shown.page.evaluate(ground)
    shown.choose("theme", "☀ light")
    light = shown.page.evaluate(ground)
    assert light != dark == opened(page, theme="dark").page.evaluate(ground)
    assert opened(page, theme="light").page.evaluate(ground) == light


def test_the_report_opens_on_the_verdict(opened: Open, page: Path, known: tuple[Path, Values]) -> None:
    shown = opened(page)
    assert shown.page.locator("nav [aria-current]").inner_text() == "Summary"
    rows = shown.page.locator(".verdict tbody tr")
    assert rows.locator("th").all_inner_texts() == [choice.label for choice in DEFAULT_CHOICES]
    tensors = [
        torch.from_numpy(np.stack([known[1][one, rank, layer, "input", at] for at in ITERATIONS])).bfloat16()
        for one, rank, layer in product(TYPES, RANKS, LAYERS)
    ]
    for row, choice in zip(rows.all(), DEFAULT_CHOICES, strict=True):
        # The names that capd does not know are other tensors.
        bits, level, _ = (cell.inner_text() for cell in row.locator("td").all())
        assert float(bits) == choice.spec.bits_per_value
        levels = []
        for x in tensors:
            d = torch.stack([qdq(one, choice.fmt).double() for one in x]) - x.double()
            levels.append(10 * float(torch.log10(x.double().square().sum() / d.square().sum())))
        assert float(level.split()[0]) == pytest.approx(sorted(levels)[len(levels) // 10], rel=5e-3)
    assert shown.page.locator(".verdict [aria-label=best]").count() == 2
    links = shown.page.locator("main .table a")
    assert links.count() == 10
    links.first.click()
    shown.page.wait_for_selector("main .facts")
    assert shown.page.locator("main p.path").first.inner_text()


def test_the_overview_tells_how_much_there_is(opened: Open, page: Path, known: tuple[Path, Values]) -> None:
    values = known[1]
    shown = opened(page)
    shown.go("overview")
    tiles = dict(
        zip(*(shown.page.locator(f".tiles {part}").all_inner_texts() for part in ("dt", "dd")), strict=True)
    )
    assert tiles["records"] == f"{len(values):,}"
    assert tiles["values"] == f"{len(values) * 4 * WIDTH:,}"
    assert tiles["series"] == f"{len(values) // len(ITERATIONS):,}"
    counts = shown.page.locator(".heat td").all_inner_texts()
    assert counts == [str(len(TENSORS) * len(ITERATIONS))] * (len(LAYERS) * len(RANKS))


def test_a_cell_of_the_heat_map_is_the_error_of_the_format_on_the_stored_values(
    opened: Open, page: Path, known: tuple[Path, Values]
) -> None:
    shown = opened(page)
    shown.go("errors")
    shown.choose("format", "mxfp4")
    heat = shown.page.locator("main .heat").first
    names = heat.locator("thead bdi").all_text_contents()
    for row in heat.locator("tbody tr").all():
        layer = row.locator("th").inner_text()
        for name, cell in zip(names, row.locator("td").all_inner_texts(), strict=True):
            own = [found for (one, _, at, tensor, _), found in known[1].items()
                   if (one, tensor, "no layer" if at is None else str(at)) == ("bf16", name, layer)]  # fmt: skip
            x = torch.from_numpy(np.stack(own)).bfloat16()
            d = qdq(x, "mxfp4").double() - x.double()
            assert float(cell) == pytest.approx(
                float(10 * torch.log10(x.double().square().sum() / d.square().sum())), rel=1e-3
            )


def test_the_page_of_a_tensor_tells_its_own_statistics(
    opened: Open, page: Path, known: tuple[Path, Values]
) -> None:
    shown = opened(page)
    data = json.loads(shown.page.locator("#data").text_content())
    for place in (0, len(data["series"]) - 1):
        shown.go(f"tensor/{place}")
        one = data["series"][place]
        own = np.stack(
            [
                known[1][one["quant_type"], one["rank"], one["layer"], one["tensor_name"], at]
                for at in ITERATIONS
            ]
        )
        facts = dict(
            zip(
                *(shown.page.locator(f"main .facts {part}").all_inner_texts() for part in ("dt", "dd")),
                strict=True,
            )
        )
        assert facts["count"] == str(own.size)
        for name, expected in (
            ("mean", own.mean(dtype=np.float64)),
            ("std", own.std(dtype=np.float64)),
            ("max", own.max()),
        ):
            assert number(facts[name]) == pytest.approx(float(expected), rel=2e-3)
        assert shown.page.locator(".uplot canvas").count() == 2


def number(text: str) -> float:
    """A number as the page writes it: 1.5·10⁻³."""
    digits, _, power = text.replace("−", "-").partition("·10")
    return float(digits) * 10.0 ** int(power.translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")) or 0)


def test_tensors_are_found_by_words_and_filters_and_sorted_by_columns(opened: Open, page: Path) -> None:
    shown = opened(page)
    shown.go("tensors")
    everything = len(TYPES) * len(RANKS) * len(LAYERS) * len(TENSORS)
    assert f"{everything} of {everything} series" in shown.text()
    assert shown.page.locator("main tbody tr").count() == 50
    shown.page.get_by_role("button", name="More →").click()
    assert shown.page.locator("main tbody tr").count() == everything - 50
    shown.choose("rank", "1")
    shown.choose("quant type", "hifp8")
    shown.page.get_by_label("Search names").fill("INPUT")
    assert f"{len(LAYERS)} of {everything} series" in shown.text()
    shown.page.get_by_role("button", name="std").click()
    shown.page.get_by_role("button", name="std").click()
    stds = [
        number(row.locator("td").nth(7).inner_text()) for row in shown.page.locator("main tbody tr").all()
    ]
    assert stds == sorted(stds, reverse=True)
    shown.page.get_by_label("Search names").fill("no such name")
    assert "Nothing matches" in shown.text()


def test_a_legend_entry_hides_its_line_and_the_numbers_stand_behind_the_figure(
    opened: Open, page: Path
) -> None:
    shown = opened(page)
    shown.go("distributions")
    entry = shown.page.locator(".legend button").first
    assert entry.get_attribute("aria-pressed") == "true"
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    shown.unfold()
    total, more = 0, shown.page.locator("details").first.get_by_role("button", name="More →")
    while True:
        counts = shown.page.locator("details table tbody tr td:nth-child(3)").all_inner_texts()
        total += sum(int(one.replace(",", "")) for one in counts)
        if not more.count() or more.is_disabled():
            break
        more.click()
    data = json.loads(shown.page.locator("#data").text_content())
    assert total == sum(data["distributions"][0]["exponents"][1:])


@pytest.mark.slow
def test_a_quick_report_says_what_needs_the_elements(opened: Open, quick_page: Path) -> None:
    shown = opened(quick_page, width=400)
    for place in ("summary", "errors", "layers", "outliers", "hifp8", "overflow", "tensor/0"):
        shown.go(place)
        assert "run capd report without --quick" in shown.text().lower(), place
    shown.go("distributions")
    assert shown.page.locator(".uplot canvas").count() == 1


def test_a_report_of_one_series_opens_on_its_page(
    opened: Open, known: tuple[Path, Values], tmp_path: Path
) -> None:
    more = (
        "--rank",
        "1",
        "--layer",
        "2",
        "--quant-type",
        "hifp8",
        "--layer-type",
        "linear",
        "--tensor",
        "input",
    )
    shown = opened(report(known[0], tmp_path / "one.html", *more))
    assert shown.page.locator("main h2").first.inner_text() == "input"


@pytest.mark.slow
def test_a_thousand_series_take_less_than_two_megabytes(opened: Open, tmp_path: Path) -> None:
    rng, gathered = np.random.default_rng(0), GatheredRecords(series=SeriesSummaries())

    def items() -> Iterator[Item]:
        for place in range(MOST_SERIES):
            key = linear_key(
                quant_type=("bf16", "hifp8")[place % 2], rank=place % 8, layer=place % 60,
                tensor_name=f"tensor{place % 4}", module=f"decoder.layers.{place % 60}.mlp.linear_fc{place}",
            )  # fmt: skip
            name = (
                f"{key.quant_type}/rank{key.rank}/layer{key.layer}/pre/{key.module}.forward.{key.tensor_name}"
            )
            values = (rng.normal(size=(2, 256)) * np.exp(rng.normal(size=256) * 2)).astype(np.float32)
            stats = public(summarise(values, "float32"))
            for iteration in range(2):
                moment = Moment(iteration=iteration, sample_idx=0)
                loaded = Loaded(
                    key, moment, "float32", values.nbytes, stats, lambda found=values: found, {}, values.shape
                )
                yield Item(f"{name}#{iteration}", values.nbytes, lambda found=loaded: found)

    for _ in gather(items(), gathered, threads=2, choices=DEFAULT_CHOICES, channels=True):
        pass
    plain = document(["run.zarr"], gathered, quick=False)
    payload = page_html(page_data(plain, gathered, files=True, choices=DEFAULT_CHOICES))
    assert len(payload) < 2_000_000
    (tmp_path / "many.html").write_bytes(payload)
    shown = opened(tmp_path / "many.html", width=400)
    for place in (*PAGES, f"tensor/{MOST_SERIES - 1}"):
        shown.go(place)
        assert shown.page.evaluate("document.documentElement.scrollWidth") == 400, place


def test_scalars_are_drawn_above_the_iterations_on_the_same_axis(opened: Open, tmp_path: Path) -> None:
    run = write_scalars(tmp_path, "run", [[3.0, 2.0, 1.5, 1.0], [1.0, 2.0, 2.5, 3.0]], [0.1, 0.2, 0.3, 0.4])
    shown = opened(report(run, tmp_path / "report.html", "--quick"))
    shown.go("iterations")

    assert shown.page.locator("main h2").all_text_contents() == ["Scalars", "Over iterations"]
    assert shown.page.locator("main h3").all_text_contents()[:2] == ["loss", "rate"]
    legends = shown.page.locator(".legend").all_text_contents()
    # Ranks that agree need one line.
    assert legends[:2] == ["meansmallestlargest", "rate"]
    marks = "(plot) => plot.querySelector('.u-over').getBoundingClientRect().left"
    assert len({shown.page.locator(".plot").nth(at).evaluate(marks) for at in range(3)}) == 1
    shown.unfold()
    rows = shown.page.locator("main details table").first.locator("tbody tr").all_text_contents()
    # The numbers of a column are of like size, and have as many decimals.
    assert rows == ["021.03.0", "122.02.0", "221.52.5", "321.03.0"]
