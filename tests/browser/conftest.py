"""A real browser, offline, and what went wrong in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.web.page import WebPage

CHROMIUM = shutil.which("chromium")
ARRIVED = "window.arrived = location.hash; addEventListener('hashchange', () => { window.arrived = location.hash; })"
FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
DRAWN = "() => [...document.querySelectorAll('.plot')].every((plot) => plot.children.length)"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser; skips where there is none. Gone with its module: as long as it is there an event loop runs in this
    thread, and whoever wants to run another one fails, zarr among them."""
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH; install Debian's package chromium")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Opened:
    """A report in a page of the browser. problems: errors of the console, uncaught ones, requests that failed."""

    page: Any
    address: str
    problems: list[str] = field(default_factory=list)

    def go(self, place: str) -> None:
        """Follow an address within the report."""
        self.page.goto(f"{self.address}#{place}")
        self.page.wait_for_function("(place) => window.arrived === `#${place}`", arg=place)
        self.page.wait_for_selector("main section")
        self.settle()

    def settle(self) -> None:
        """Wait until every chart is drawn: each is made when the browser has told it its width, a frame later."""
        self.page.wait_for_function(DRAWN)
        self.page.evaluate(FRAMES)

    def text(self, selector: str = "main") -> str:
        return str(self.page.inner_text(selector))

    def unfold(self) -> None:
        """Open the numbers of the first figure. The browser tells the page later, and the page makes its table then."""
        self.page.locator("main summary").first.click()
        self.page.locator("main details table tbody tr").first.wait_for()

    def choose(self, label: str, option: str) -> None:
        self.page.get_by_label(label, exact=True).first.select_option(label=option)
        self.settle()


@pytest.fixture
def opened(chromium: Any) -> Iterator[Callable[..., Opened]]:
    """`opened(path, width=400, theme="dark")` opens a report, offline; at the end nothing may have gone wrong in it."""
    reports: list[Opened] = []
    with ExitStack() as closing:

        def open_(path: Path, *, width: int = 1280, theme: str = "light") -> Opened:
            size = {"width": width, "height": 900}
            context = closing.enter_context(
                chromium.new_context(offline=True, viewport=size, color_scheme=theme)
            )
            context.add_init_script(ARRIVED)
            found = Opened(context.new_page(), path.as_uri())
            page, problems = found.page, found.problems
            page.on("console", lambda said: said.type in ("error", "warning") and problems.append(said.text))
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("requestfailed", lambda request: problems.append(f"failed: {request.url}"))
            page.on(
                "request",
                lambda request: request.url.startswith(("file:", "data:")) or problems.append(request.url),
            )
            page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
            page.set_default_timeout(30_000)
            page.goto(found.address)
            page.wait_for_selector("main section")
            reports.append(found)
            return found

        yield open_
    assert [report.problems for report in reports] == [[] for _ in reports]


class Browsed:
    """A page of the browser that is in. problems: of the console, uncaught errors, failed and foreign requests."""

    def __init__(self, page: Any, web: WebPage) -> None:
        self.page, self.web, self.problems = page, web, list[str]()
        page.on("console", lambda said: said.type in ("error", "warning") and self.problems.append(said.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: (self.problems.append(dialog.message), dialog.dismiss()))
        page.on(
            "request", lambda one: one.url.startswith((web.address, "data:")) or self.problems.append(one.url)
        )
        page.on("requestfailed", self._failed)
        page.set_default_timeout(30_000)
        page.add_init_script(ARRIVED)

    def _failed(self, request: Any) -> None:
        # A page that is left ends its stream and its questions.
        if request.failure != "net::ERR_ABORTED":
            self.problems.append(f"failed: {request.url} {request.failure}")

    def go(self, place: str, query: str = "") -> None:
        self.page.goto(f"{self.web.address}{query}#{place}")
        # The browser tells a page of a new hash later. Until then, the page of the old one is seen.
        self.page.wait_for_function("(place) => window.arrived === place", arg=f"#{place}" if place else "")
        self.page.wait_for_selector(f"main[data-page='{place.partition('/')[0] or 'runs'}']")
        self.settle()

    def settle(self) -> None:
        self.page.wait_for_function(DRAWN)
        self.page.evaluate(FRAMES)

    def wait_for_count(self, selector: str, count: int) -> None:
        self.page.wait_for_function(
            "([selector, count]) => document.querySelectorAll(selector).length === count",
            arg=[selector, count],
        )

    def text(self, selector: str = "main") -> str:
        return str(self.page.inner_text(selector))


Browse = Callable[..., Browsed]


@pytest.fixture
def browse(chromium: Any) -> Iterator[Browse]:
    """`browse(web)` enters a page by its link; at the end nothing may have gone wrong in it."""
    made: list[Browsed] = []
    with ExitStack() as closing:

        def open_(web: WebPage, *, width: int = 1280, theme: str = "light", locale: str = "en-US") -> Browsed:
            size = {"width": width, "height": 900}
            context = closing.enter_context(
                chromium.new_context(viewport=size, color_scheme=theme, locale=locale)
            )
            found = Browsed(context.new_page(), web)
            context.add_cookies([{"name": web.cookie.partition("=")[0], "value": web.cookie.partition("=")[2],
                                  "url": web.address, "httpOnly": True, "sameSite": "Strict"}])  # fmt: skip
            found.go("")
            made.append(found)
            return found

        yield open_
        assert [one.problems for one in made] == [[] for _ in made]
