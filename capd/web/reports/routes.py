"""The addresses of reports: their state and their making as JSON, and each report in a sandbox of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from capd.errors import CapdError, ConfigError, NoSuchSeries, NotAStore, StoreBusy
from capd.strict_json import strict_json
from capd.web.access import REPORT_PATH
from capd.web.reports.shelf import ReportShelf

__all__ = ["SANDBOX", "json_answer", "report_routes", "status_of"]

SANDBOX: Mapping[str, str] = {
    "Content-Security-Policy": (
        "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    # A browser refuses a sandbox that also has a group of windows of its own.
    "Cross-Origin-Opener-Policy": "unsafe-none",
}
"""The headers of a report. Its origin is none: it has no cookie, and none of its requests is the page's own."""

_CHUNK_NBYTES = 256 << 10


def report_routes(shelf: ReportShelf, pool: ThreadPoolExecutor) -> list[Route]:
    """Return the addresses of reports.

    Args:
        shelf: What makes and keeps them.
        pool: The threads that ask it.
    """

    def answered(read: Callable[[QueryParams], Any], request: Request) -> asyncio.Future[Response]:
        return asyncio.get_running_loop().run_in_executor(pool, _answered, read, request.query_params)

    def state(query: QueryParams) -> Response:
        return json_answer(shelf.look(_run(query)))

    def make(query: QueryParams) -> Response:
        shelf.make(_run(query), query.get("kind", ""))
        return state(query)

    def stop(query: QueryParams) -> Response:
        shelf.stop(_run(query))
        return state(query)

    async def asked(request: Request) -> Response:
        return await answered(make if request.method == "POST" else state, request)

    async def stopped(request: Request) -> Response:
        return await answered(stop, request)

    async def shown(request: Request) -> Response:
        return await asyncio.get_running_loop().run_in_executor(pool, _shown, shelf, request.query_params)

    return [
        Route("/api/report", asked, methods=["GET", "POST"]),
        Route("/api/report/stop", stopped, methods=["POST"]),
        Route(REPORT_PATH, shown),
    ]


def status_of(error: CapdError) -> int:
    """Return the status of an answer that an error has made."""
    if isinstance(error, NotAStore | NoSuchSeries):
        return 404
    if isinstance(error, StoreBusy):
        return 409
    return 400 if isinstance(error, ConfigError) else 503


def json_answer(value: Mapping[str, Any], status: int = 200) -> Response:
    """Return an answer as JSON."""
    text = json.dumps(strict_json(value), allow_nan=False, separators=(",", ":"))
    return Response(text, status, media_type="application/json")


def _answered(read: Callable[[QueryParams], Response], query: QueryParams) -> Response:
    try:
        return read(query)
    except CapdError as error:
        return json_answer({"problem": str(error)}, status_of(error))


def _shown(shelf: ReportShelf, query: QueryParams) -> Response:
    try:
        file, nbytes = shelf.opened(_run(query), query.get("kind", ""))
    except CapdError as error:
        return PlainTextResponse(f"{error}\n", status_of(error))
    headers = {**SANDBOX, "Content-Length": str(nbytes)}
    return StreamingResponse(_chunks(file), headers=headers, media_type="text/html")


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while part := file.read(_CHUNK_NBYTES):
            yield part


def _run(query: QueryParams) -> str:
    name = query.get("run")
    if not name:
        raise ConfigError("this address needs run=NAME")
    return name
