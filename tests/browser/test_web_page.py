"""`capd web` in a real browser: every page, hostile names, the numbers of the store, live counters, alerts, Chinese."""

from __future__ import annotations

import math
import signal
import struct
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capd.store.read.store import open_store
from capd_client.protocol.counter_page import PAGE_NBYTES
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import Define, Descriptor, Put
from tests.browser.conftest import Browse
from tests.kit.daemon import DaemonProcess, Rank, daemons
from tests.kit.store.cli import StoreWriter, bf16_bits, linear_key
from tests.kit.store.scalars import put_scalar
from tests.kit.web.lab import LabRows
from tests.kit.web.page import WebPage, web_page

HOSTILE = "</script><img src=x onerror=alert(1)>"
TENSORS = ("input", HOSTILE, "\u202eمرحبا 🎉", "\"'`${alert(2)}")
LAYERS = (0, 1, 2)
ITERATIONS = (0, 1, 2, 3, 4, 9, 10)
RUNS = ("exp1", "exp2", "a 'quoted' & <b>run")
OF_A_RUN = ("overview", "tensors", "layers", "scalars", "alerts")
NAN_RULE = (
    '[[trigger]]\nname = "<i>nan</i>"\nmetric = "nan"\nabove = 0\nseverity = "critical"\ncooldown = 1\n'
)

COLOURS = """() => {
  const canvas = document.querySelector(".map canvas");
  const image = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const at = (x, y) => image.slice(4 * (y * canvas.width + x), 4 * (y * canvas.width + x) + 3).join();
  const column = (x) => new Set(Array.from({ length: canvas.height }, (_, y) => at(x, y)));
  return Array.from({ length: canvas.width }, (_, x) => column(x).size);
}"""
"""The number of colours in each column of the first map."""


MARKS = """() => [...document.querySelectorAll(".plot .mark")].map((mark) =>
  parseFloat(mark.style.left) / mark.parentElement.clientWidth).sort()"""
"""The places of marks in their chart, as parts of its width."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(7)
    for number, run in enumerate(RUNS):
        writer = StoreWriter(root)
        for iteration, layer, name in product(ITERATIONS, LAYERS, TENSORS):
            bits = bf16_bits(rng.normal(size=(8, 32)) * 2.0 ** (layer - iteration))
            key = linear_key(layer=layer, tensor_name=name, module=f"m.{layer}.{name}")
            writer.put(run, key, bits, "bfloat16", Moment(iteration=iteration, time_ns=1))
        for iteration in ITERATIONS:
            put_scalar(writer, run, "loss", 0, number + 1 / (1 + iteration), iteration)
        writer.close()
    return root


@pytest.fixture(scope="module")
def web(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebPage]:
    with web_page(root, tmp_path_factory.mktemp("web")) as found:
        yield found


def paths(root: Path, run: str = "exp1", tensor: str = "input") -> list[str]:
    return [series.path for series in open_store(root / f"{run}.zarr").find(tensor_name=tensor)]


def quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


def places(root: Path) -> list[str]:
    tensors = [f"tensor/exp1/{quoted(path)}" for name in TENSORS for path in paths(root, tensor=name)[:1]]
    return ["", "health", *(f"{name}/{quoted(run)}" for name, run in product(OF_A_RUN, RUNS[1:])), *tensors]


def test_the_link_lets_a_browser_in_and_leaves_no_token(chromium: Any, root: Path, tmp_path: Path) -> None:
    with web_page(root, tmp_path, enter=False) as web, chromium.new_context() as context:
        page = context.new_page()
        assert page.goto(web.address).status == 403
        page.goto(web.link)
        page.wait_for_selector("main[data-page='runs']")
        assert page.url == web.address
        assert page.evaluate("document.cookie") == ""
        [cookie] = context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")


def test_a_page_of_another_site_gets_nothing(chromium: Any, web: WebPage, root: Path, tmp_path: Path) -> None:
    """The other site is on another port of the same machine, so that only the checks of the page stand in between."""
    name, _, value = web.cookie.partition("=")
    with web_page(root, tmp_path) as other, chromium.new_context() as context:
        for one in (web, other):
            name, _, value = one.cookie.partition("=")
            context.add_cookies([{"name": name, "value": value, "url": one.address, "httpOnly": True}])
        page = context.new_page()
        page.goto(other.address)
        ask = "(url) => fetch(url, { mode: 'no-cors', credentials: 'include' }).then(() => 'sent', () => 'refused')"
        # The policy of the page itself refuses it; a page without one is refused by the answer.
        assert page.evaluate(ask, f"{web.address}api/runs") == "refused"
        page.goto("about:blank")
        answers: list[int] = []
        page.on("response", lambda answer: answers.append(answer.status))
        page.evaluate(ask, f"{web.address}api/runs")
        page.evaluate(
            "(url) => new Promise((done) => { const i = new Image(); i.onload = i.onerror = done; i.src = url; })",
            f"{web.address}api/runs",
        )
        assert set(answers) <= {403}


@pytest.mark.parametrize(
    ("width", "theme"),
    [(1280, "light"), (400, "dark"), pytest.param(1280, "dark", marks=pytest.mark.slow)],
)
def test_every_page_opens_and_none_scrolls_sideways(
    browse: Browse, web: WebPage, root: Path, width: int, theme: str
) -> None:
    shown = browse(web, width=width, theme=theme)
    for place in places(root):
        shown.go(place)
        assert shown.page.evaluate("document.documentElement.scrollWidth") == width, place
        assert shown.page.locator("main h2").count() >= 1, (place, shown.text())


def test_names_are_text_and_nothing_else(browse: Browse, web: WebPage, root: Path) -> None:
    shown = browse(web)
    for place in places(root):
        shown.go(place)
        assert shown.page.locator("main img, main script, header img, main b").count() == 0, place
    shown.go("tensors/exp1")
    shown.page.wait_for_selector("text=1 to 12 of 12")
    names = shown.page.locator("td .name").all_text_contents()
    for tensor in TENSORS:
        assert any(tensor in name for name in names), tensor
    shown.go(f"overview/{quoted(RUNS[2])}")
    assert RUNS[2] in shown.text("h1")
    assert "report 'a" not in shown.text(".command")


def test_a_search_and_a_filter_find_tensors(browse: Browse, web: WebPage) -> None:
    shown = browse(web)
    shown.go("tensors/exp1")
    shown.page.wait_for_selector("text=1 to 12 of 12")
    shown.page.get_by_label("Search names").fill("m.1 INPUT")
    shown.page.wait_for_selector("text=1 to 1 of 1")
    shown.page.get_by_label("Search names").fill("nothing such")
    shown.page.wait_for_selector("text=Nothing matches")
    shown.page.get_by_label("Search names").fill("")
    shown.page.get_by_label("layer", exact=True).select_option(label="2")
    shown.page.wait_for_selector("text=1 to 4 of 4")
    shown.page.locator("td a").first.click()
    shown.page.wait_for_selector("main[data-page='tensor']")


def test_the_numbers_are_those_of_the_store(browse: Browse, web: WebPage, root: Path) -> None:
    path = paths(root)[1]
    records = open_store(root / "exp1.zarr")[path].records
    shown = browse(web)
    shown.go(f"tensor/exp1/{quoted(path)}")
    shown.page.locator("details summary").click()
    shown.page.wait_for_selector("details tbody tr")
    rows = shown.page.locator("details tbody tr")
    shown.wait_for_count("details tbody tr", len(ITERATIONS))
    for number, record in enumerate(records):
        cells = rows.nth(number).locator("td").all_inner_texts()
        assert int(cells[0]) == record.iteration
        shown_absmax = float(
            cells[1]
            .replace("−", "-")
            .replace("·10", "e")
            .translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-"))
        )
        assert math.isclose(shown_absmax, record.stats.absmax, rel_tol=1e-2)
    # Four iterations are missing: their columns have one colour, that of nothing.
    colours = shown.page.evaluate(COLOURS)
    assert len(colours) == 11
    assert [at for at, count in enumerate(colours) if count == 1] == [5, 6, 7, 8]


def test_runs_are_laid_over_each_other(browse: Browse, web: WebPage, root: Path) -> None:
    shown = browse(web)
    for run in RUNS[:2]:
        shown.page.get_by_label(f"choose {run}", exact=True).check()
    shown.page.get_by_role("button", name="Scalars of the chosen runs").click()
    shown.page.wait_for_selector("main[data-page='scalars']")
    shown.settle()
    shown.wait_for_count(".legend button", 2)
    assert shown.page.locator(".legend button").all_inner_texts() == list(RUNS[:2])
    shown.page.locator("details summary").first.click()
    shown.page.wait_for_selector("details tbody tr")
    first = shown.page.locator("details tbody tr").first.locator("td").all_inner_texts()
    assert [float(cell) for cell in first] == [0, 1, 2]
    shown.go(f"tensor/exp1/{quoted(paths(root)[0])}")
    shown.page.get_by_label("compare with").select_option(label=RUNS[2])
    shown.page.wait_for_selector(f"text=without {RUNS[2]}")
    shown.wait_for_count(".map canvas", 2)


def test_a_layer_leads_to_its_tensor(browse: Browse, web: WebPage, root: Path) -> None:
    shown = browse(web)
    shown.go("layers/exp1")
    shown.page.get_by_label("tensor", exact=True).select_option(label="input")
    shown.page.get_by_label("statistic", exact=True).select_option(label="flushed by e4m3 (%)")
    shown.settle()
    shown.page.wait_for_selector(".map canvas[aria-label='flushed by e4m3 (%), layer by iteration']")
    assert shown.page.evaluate("document.querySelector('.map canvas').height") == len(LAYERS)
    box = shown.page.locator(".map canvas").bounding_box()
    shown.page.mouse.move(box["x"] + 5, box["y"] + box["height"] - 5)
    shown.page.wait_for_selector("text=layer 2 · iteration 0:")
    shown.page.mouse.click(box["x"] + 5, box["y"] + box["height"] - 5)
    shown.page.wait_for_selector("main[data-page='tensor']")
    assert paths(root)[2] in shown.text()


def test_samples_of_sqnr(browse: Browse, web: WebPage, root: Path) -> None:
    shown = browse(web)
    shown.go(f"tensor/exp1/{quoted(paths(root)[0])}")
    shown.page.get_by_role("button", name="Measure samples").click()
    shown.page.wait_for_selector("text=/sampled [1-7] of 7 records/")
    assert {"fp8", "mxfp8", "hifp8"} <= set(
        shown.page.locator(".samples tbody td:first-child").all_inner_texts()
    )


def test_the_page_is_chinese_by_browser_or_by_choice(browse: Browse, web: WebPage) -> None:
    shown = browse(web, locale="zh-CN")
    assert shown.page.locator("html").get_attribute("lang") == "zh-Hans"
    assert "Run 列表" in shown.text("header")
    shown.go("tensors/exp1")
    shown.page.get_by_label("语言").select_option(label="English")
    shown.page.wait_for_selector("text=A series is one tensor")
    assert shown.page.url.endswith("#tensors/exp1")


def test_errors_of_the_lab_stand_beside_the_samples(browse: Browse, tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "store")
    lab, rng = LabRows(writer), np.random.default_rng(3)
    for iteration in range(3):
        key = linear_key(tensor_name=HOSTILE, module=HOSTILE)
        lab.put("run", key, bf16_bits(rng.normal(size=(32, 64))), Moment(iteration=iteration))
    writer.close()
    [series] = open_store(tmp_path / "store" / "run.zarr").find(tensor_name=HOSTILE)
    with web_page(tmp_path / "store", tmp_path) as web:
        shown = browse(web)
        shown.go("tensors/run")
        shown.page.wait_for_selector("text=1 to 1 of 1")
        shown.go(f"tensor/run/{quoted(series.path)}")
        shown.page.wait_for_selector(".errors .chart")
        assert shown.page.locator(".errors .legend button").all_inner_texts() == ["hifp8", "mxfp8"]
        shown.page.locator(".errors details summary").click()
        # The browser tells the page later that it is open, and the page makes its table then.
        shown.wait_for_count(".errors tbody tr", 3)
        cells = shown.page.locator(".errors tbody tr").last.locator("td").all_inner_texts()
        expected = [2, *(series.records[2].errors[label].sqnr_db for label in ("hifp8", "mxfp8"))]
        assert [float(cell) for cell in cells] == pytest.approx(expected, rel=1e-2)
        shown.page.get_by_label("number", exact=True).select_option(label="std of log2 of the block scales")
        shown.settle()
        assert shown.page.locator("main img").count() == 0


def put(rank: Rank, iteration: int, value: float) -> None:
    code = struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    offset = PAGE_NBYTES + 64 * iteration
    rank.memory[offset : offset + 8] = struct.pack("<4H", code, 0, 0, 0)
    rank.send(
        Put([Descriptor(iteration, offset, 8, 1, (4,), Moment(iteration=iteration, time_ns=time.time_ns()))])
    )
    rank.expect_acks(iteration)


@pytest.fixture
def made() -> Iterator[list[DaemonProcess]]:
    with daemons() as found:
        yield found


def test_a_live_run_its_alert_and_a_daemon_that_dies(
    browse: Browse, made: list[DaemonProcess], runtime_dir: Path, tmp_path: Path
) -> None:
    config = tmp_path / "capd.toml"
    config.write_text(NAN_RULE)
    endpoint, store = runtime_dir / "s.sock", tmp_path / "store"
    made.append(DaemonProcess(store, endpoint, "--config", str(config)))
    ranks = [Rank(endpoint, rank=number) for number in range(2)]
    for number, rank in enumerate(ranks):
        rank.connect()
        rank.send(Define(id=1, key=linear_key(rank=number), dtype="bfloat16"))
        for iteration in range(3):
            put(rank, iteration, 1.0)
    ranks[0].count(offered=5, arena_full=2)
    with web_page(store, tmp_path, endpoint=endpoint) as web:
        shown = browse(web)
        shown.go("overview/run")
        shown.page.wait_for_selector("table.newest tbody tr:nth-child(6)")
        shown.page.wait_for_selector("text=The report comes when the run has finished.")
        assert not shown.page.get_by_role("button", name="Report", exact=True).is_visible()
        shown.wait_for_count("table.ranks tbody tr", 2)
        # The counters of a rank come with a later sample than its records.
        shown.page.locator("main", has_text="arena_full").wait_for()
        shown.page.get_by_role("button", name="Pause").click()
        # A NaN at step 3 of rank 1.
        put(ranks[1], 3, math.nan)
        began = time.monotonic()
        shown.page.wait_for_selector("nav a.critical:text('Alerts 1')")
        assert time.monotonic() - began < 3
        assert shown.page.locator("table.newest tbody tr").count() == 6
        shown.page.get_by_role("button", name="Go on").click()
        shown.page.wait_for_selector("table.newest tr.critical")
        shown.page.get_by_label("Filter the newest records").fill("nothing such")
        shown.page.wait_for_function("() => !document.querySelector('table.newest tbody tr')")
        shown.go("alerts/run")
        shown.page.wait_for_selector("main tbody tr td:nth-child(5)")
        cells = shown.page.locator("main tbody tr td").all_inner_texts()
        assert (cells[1], cells[2], cells[3], cells[4]) == ("critical", "<i>nan</i>", "1", "3")
        # A later alert reaches the page of its tensor, and is marked on the curve that now has its iteration.
        shown.page.locator("main tbody tr td a").click()
        shown.page.wait_for_selector(".plot .mark.critical:visible")
        put(ranks[1], 4, 1.0)
        put(ranks[1], 5, math.nan)
        shown.page.wait_for_function(
            "() => document.querySelectorAll('.plot .mark.critical:not([hidden])').length === 2"
        )
        titles = [one.get_attribute("title") for one in shown.page.locator(".plot .mark").all()]
        assert all(title.startswith("<i>nan</i>: ") for title in titles)
        left = shown.page.evaluate(MARKS)
        assert left == pytest.approx([3 / 5, 1.0], abs=0.02)
        made[0].stop(signal.SIGKILL)
        shown.page.wait_for_selector(".banner:visible:has-text('does not answer')")
        made.append(DaemonProcess(store, endpoint, "--config", str(config)))
        shown.page.wait_for_selector(".banner", state="hidden")
        shown.go("health")
        shown.page.wait_for_selector("text=Daemon")
        # The page's own server ends: the page says so.
        web.stop()
        shown.page.wait_for_selector(".banner:visible:has-text('Is capd web still running?')")
        shown.problems[:] = [
            one
            for one in shown.problems
            if "ERR_CONNECTION_REFUSED" not in one and "ERR_INCOMPLETE" not in one
        ]
    for rank in ranks:
        rank.close()
