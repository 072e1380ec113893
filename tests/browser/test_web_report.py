"""The report of a run in `capd web`: opened from the run's page, in a sandbox without the page's cookie and answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from capd_client.protocol.key import Moment
from tests.browser.conftest import Browse, Browsed
from tests.kit.store.cli import StoreWriter, bf16_bits, linear_key
from tests.kit.web.page import WebPage, web_page

ODD = "a 'quoted' & <b>run"
LIMIT_MS = 180_000
COOKIE = "() => { try { return document.cookie; } catch (error) { return error.name; } }"
STORED = "() => { try { return String(localStorage); } catch (error) { return error.name; } }"
FETCH = "(url) => fetch(url, { credentials: 'include' }).then(() => 'sent', (error) => error.name)"
SENT = "(url) => fetch(url, { method: 'POST', mode: 'no-cors' }).then(() => 'sent', (error) => error.name)"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebPage]:
    writer, rng = StoreWriter(tmp_path / "runs"), np.random.default_rng(7)
    for run in (ODD, "gone"):
        for iteration in range(2):
            key = linear_key(tensor_name="<img src=x onerror=alert(1)>")
            writer.put(
                run, key, bf16_bits(rng.normal(size=(16, 32))), "bfloat16", Moment(iteration=iteration)
            )
    writer.close()
    with web_page(tmp_path / "runs", tmp_path) as found:
        yield found


def opened(shown: Browsed) -> tuple[Any, list[str]]:
    """The report that the link opens, and what goes wrong in it."""
    problems: list[str] = []

    def watch(page: Any) -> None:
        page.on("console", lambda said: said.type in ("error", "warning") and problems.append(said.text))
        page.on("pageerror", lambda error: problems.append(str(error)))

    shown.page.context.on("page", watch)
    with shown.page.context.expect_page() as opening:
        shown.page.get_by_role("link", name="Open the report").click()
    report = opening.value
    report.locator("main section").first.wait_for()
    return report, problems


def test_a_report_opens_in_a_sandbox(browse: Browse, web: WebPage) -> None:
    shown = browse(web)
    shown.go(f"overview/{quote(ODD, safe='')}")
    shown.page.get_by_label("kind of report").select_option(label="quick: stored statistics")
    shown.page.get_by_role("button", name="Report", exact=True).click()
    shown.page.get_by_role("link", name="Open the report").wait_for(timeout=LIMIT_MS)
    report, problems = opened(shown)
    assert ODD in report.inner_text("h1")
    assert report.reload().status == 200
    report.locator("main section").first.wait_for()
    # Its links lead on within it.
    report.locator("header nav a[href='#overview']").click()
    report.locator("header nav a[href='#overview'][aria-current='page']").wait_for()
    assert report.locator("main img, main b").count() == 0
    assert problems == []
    # A browser takes this reload for one of another site; the page that asks once more is no success to it.
    report.reload()
    report.locator("header nav a[href='#overview'][aria-current='page']").wait_for()
    assert [one for one in problems if "403" not in one] == []
    problems.clear()
    report.goto(report.url.replace("lang=en", "lang=zh"))
    report.locator("html[lang='zh-Hans']").wait_for()
    assert problems == []
    # A script in it is of no origin: it has no cookie, and no way to the page.
    assert report.evaluate("self.origin") == "null"
    assert report.evaluate("window.opener") is None
    assert report.evaluate(COOKIE) == "SecurityError"
    assert report.evaluate(STORED) == "SecurityError"
    for script, path in ((FETCH, "api/runs"), (SENT, "api/report/stop?run=gone")):
        assert report.evaluate(script, web.address + path) == "TypeError"
    # Not even by leading itself there.
    with report.expect_navigation() as led:
        report.evaluate("(url) => { location.href = url; }", f"{web.address}api/runs")
    assert led.value.status == 403
    # The page itself has its cookie still, and shows the report as it is when it is opened again.
    shown.go("overview/gone")
    shown.page.get_by_role("button", name="Report", exact=True).wait_for()
    shown.go(f"overview/{quote(ODD, safe='')}")
    shown.page.get_by_label("kind of report").select_option(label="quick: stored statistics")
    shown.page.get_by_role("link", name="Open the report").wait_for()


def test_a_run_that_is_removed_is_told_in_words(browse: Browse, web: WebPage) -> None:
    shown = browse(web)
    shown.go("overview/gone")
    button = shown.page.get_by_role("button", name="Report", exact=True)
    button.wait_for()
    shutil.rmtree(web.store / "gone.zarr")
    button.click()
    shown.page.locator("p[role='status']", has_text="gone.zarr").wait_for()
    # The browser tells of the refusals that the page has asked for.
    shown.problems[:] = [one for one in shown.problems if "404" not in one]
