"""The addresses of the page: its shell, its scripts, the stream of events, and the answers as JSON."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from capd._version import __version__
from capd.errors import CapdError
from capd.web.answers import Answers
from capd.web.live import LiveView
from capd.web.reports.routes import json_answer, report_routes, status_of
from capd.web.reports.shelf import ReportShelf
from capd.web.stream import Hub

__all__ = ["Application"]

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_THREADS = 2
_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
_LANGUAGES = {"en": "en", "zh": "zh-Hans"}
# The page has the report's charts, tables and style, and beside them its own scripts.
_FOLDERS = {"report": files("capd.report") / "assets", "web": files("capd.web") / "assets"}


class Application:
    """The page over one store. Its answers are made in two threads, so at most two take memory at a time."""

    def __init__(self, answers: Answers, live: LiveView, reports: ReportShelf) -> None:
        """Prepare to answer.

        Args:
            answers: What is asked of the store.
            live: The state of the daemon.
            reports: The reports of finished runs.
        """
        self.hub = Hub()
        self._answers, self._live, self._reports = answers, live, reports
        self._pool = ThreadPoolExecutor(_THREADS, "capd-web")
        # Errors are read by processes of their own, one at a time, and no other answer waits for them.
        self._reading = ThreadPoolExecutor(1, "capd-web-errors")
        # A sample must not wait for an answer that takes long.
        self._sampling = ThreadPoolExecutor(1, "capd-web-live")
        self._began, self._requests, self._failed = time.monotonic(), 0, False
        self._static = {
            f"{folder}/{path}": (content, _TYPES[path[path.rindex(".") :]])
            for folder, place in _FOLDERS.items()
            for path, content in _assets(place)
        }
        self._shell = (_FOLDERS["web"] / "page.html").read_text(encoding="utf-8")
        self.starlette = Starlette(
            routes=[
                Route("/", self._page),
                Route("/static/{path:path}", self._asset),
                Route("/events", self._events),
                Route("/api/health", self._health),
                *report_routes(reports, self._pool),
                Route("/api/errors", self._json(answers.errors, self._reading)),
                *(
                    Route(f"/api/{name}", self._json(getattr(answers, name), self._pool))
                    for name in ("runs", "run", "series", "tensor", "scalar", "layers", "sqnr", "alerts")
                ),
            ]
        )

    async def sample_forever(self) -> None:
        """Sample the daemon once a second while somebody looks."""
        loop = asyncio.get_running_loop()
        while True:
            if self.hub.clients:
                try:
                    self.hub.publish(await loop.run_in_executor(self._sampling, self._live.sample))
                except Exception:
                    # This is the outermost loop. Pages keep the last state, and the log must not fill up.
                    if not self._failed:
                        self._failed = True
                        logger.exception("a sample failed; further failures are not logged")
            await asyncio.sleep(_PERIOD_S)

    def close(self) -> None:
        """Stop the threads."""
        self._answers.samples.close()
        self._reports.close()
        for pool in (self._pool, self._reading, self._sampling):
            pool.shutdown(wait=False, cancel_futures=True)
        self._live.close()

    async def _page(self, request: Request) -> Response:
        language = language_of(request.query_params.get("lang"), request.headers.get("accept-language", ""))
        return HTMLResponse(self._shell.replace("{lang}", _LANGUAGES[language]))

    async def _asset(self, request: Request) -> Response:
        found = self._static.get(request.path_params["path"])
        if found is None:
            return PlainTextResponse("there is no such file\n", 404)
        return Response(found[0], media_type=found[1])

    async def _events(self, _: Request) -> Response:
        return self.hub.answer()

    async def _health(self, _: Request) -> Response:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return json_answer(
            {
                "version": __version__,
                "uptime_s": time.monotonic() - self._began,
                "viewers": self.hub.clients,
                "answers": self._requests,
                "memory_bytes": _resident(),
                "most_memory_bytes": usage.ru_maxrss << 10,
                "cpu_s": usage.ru_utime + usage.ru_stime,
            }
        )

    def _json(
        self, read: Callable[[QueryParams], Any], pool: ThreadPoolExecutor
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            self._requests += 1
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(pool, _answered, read, request.query_params)

        return answer


def language_of(wanted: str | None, accepted: str) -> str:
    """Return the language of the page: `?lang=` if it is one, else the first of Accept-Language that the page has."""
    if wanted in _LANGUAGES:
        return wanted
    ranked = []
    for place, part in enumerate(accepted.split(",")[:32]):
        tag, _, quality = part.partition(";")
        weight = quality.strip().removeprefix("q=") or "1"
        if weight.replace(".", "", 1).isdigit() and float(weight) > 0:
            ranked.append((-float(weight), place, tag.strip().lower()[:2]))
    return next((tag for _, _, tag in sorted(ranked) if tag in _LANGUAGES), "en")


def _answered(read: Callable[[QueryParams], Any], query: QueryParams) -> Response:
    try:
        return json_answer(read(query))
    except CapdError as error:
        return json_answer({"problem": str(error)}, status_of(error))


def _assets(place: Any, below: str = "") -> list[tuple[str, bytes]]:
    found = []
    for one in place.iterdir():
        if one.is_dir():
            found += _assets(one, f"{below}{one.name}/")
        elif one.name.endswith(tuple(_TYPES)):
            found.append((f"{below}{one.name}", one.read_bytes()))
    return found


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
