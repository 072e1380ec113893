"""The checks of each request, before anything is read: its method, its Host, where it comes from, and its key.

A browser on this machine shows pages of other sites, and these may send requests to loopback addresses. The Host stops
those that come by a name of their own (DNS rebinding), Origin and Sec-Fetch-Site stop the others, and the cookie is
never sent along with a request of another site.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capd.web.keys import Keys

__all__ = ["LOOPBACK_NAMES", "REPORT_PATH", "Door", "Guard"]

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""The names by which a browser reaches this machine, also through `ssh -L`."""

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""The headers of every answer, refusals included. A report alone has a policy of its own."""

REPORT_PATH = "/report"
"""The address of reports, which have a policy of their own."""

# A report is of no site. A browser therefore says of its reload that another site has sent it, once a link within the
# report was followed, and keeps the cookie back. This page has nothing from the store, and asks again as itself.
_ONCE_MORE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>capd web</title></head>'
    "<body><p>Open the report from the page of its run. 请从运行的页面打开报告。</p>"
    '<script src="static/web/again.js"></script></body></html>'
)

_MAX_NBYTES = 32 << 10
# What starts or ends something. All else only reads.
_POSTED = frozenset({"/api/report", "/api/report/stop"})
_OWN_SITES = ("same-origin", "none")
_PORT = re.compile(r":\d*$")
_OPEN_LINK = "open the link that `capd web` has printed last"


@dataclass(frozen=True, slots=True)
class Door:
    """What a request must have.

    Attributes:
        keys: The token and the cookie.
        hosts: The names that the header Host may have.
        cookie_name: The name of the cookie. Cookies ignore ports, so it differs by port.
    """

    keys: Keys
    hosts: frozenset[str]
    cookie_name: str

    def refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a request that may not pass; None for one that may."""
        headers = Headers(scope=scope)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        posts = scope["method"] == "POST" and path in _POSTED
        if scope["method"] not in ("GET", "HEAD") and not posts:
            return _refused(405, "this page only answers GET and HEAD", Allow="GET, HEAD")
        if len(scope["query_string"]) + sum(map(len, chain(*headers.raw))) > _MAX_NBYTES:
            return _refused(431, f"a request has {_MAX_NBYTES} bytes of headers at most")
        hosts = headers.getlist("host")
        if len(hosts) != 1 or _PORT.sub("", hosts[0]).lower() not in self.hosts:
            return _refused(
                400, "this Host is none of the page's; `capd web --allow-host NAME` adds a proxy's"
            )
        if headers.get("sec-fetch-site", "none") not in _OWN_SITES:
            if path == REPORT_PATH and _is_window(headers):
                return HTMLResponse(_ONCE_MORE, 403)
            return _refused(403, f"a page of another site has sent this; {_OPEN_LINK} in a new tab")
        if "origin" in headers and headers["origin"] not in (f"http://{hosts[0]}", f"https://{hosts[0]}"):
            return _refused(403, "a page of another origin has sent this")
        # A browser names the origin of every POST.
        if posts and "origin" not in headers:
            return _refused(403, "this address only answers the page, which names its origin")
        token = QueryParams(scope["query_string"]).get("token")
        if token is not None:
            return self._let_in(token, headers, scope)
        if not self.keys.knows(self._cookie(headers)):
            return _refused(403, f"this browser has no key: {_OPEN_LINK}")
        return None

    def _let_in(self, token: str, headers: Headers, scope: Scope) -> Response:
        # A HEAD, as link previews send it, must not use the link up.
        if scope["method"] != "GET" or not self.keys.redeem(token):
            return _refused(403, f"this link is wrong, or was used before; {_OPEN_LINK}")
        # Relative, so that it stays below whatever path a proxy has.
        answer = Response(status_code=303, headers={"Location": "./"})
        secure = headers.get("x-forwarded-proto") == "https"
        answer.set_cookie(
            self.cookie_name, self.keys.cookie, path=scope.get("root_path", "") or "/", httponly=True,
            samesite="strict", secure=secure,
        )  # fmt: skip
        return answer

    def _cookie(self, headers: Headers) -> str:
        for line in headers.getlist("cookie"):
            for part in line.split(";"):
                name, _, value = part.strip().partition("=")
                if name == self.cookie_name:
                    return value
        return ""


class Guard:
    """The outermost layer of the page: it refuses what may not pass, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._door.refusal(scope)
        await (self._app if refusal is None else refusal)(scope, receive, with_headers)


def _is_window(headers: Headers) -> bool:
    """Return whether a window asks, and no frame, image or script of a page."""
    return (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")


def _refused(status: int, text: str, **headers: str) -> Response:
    return PlainTextResponse(f"{text}\n", status, headers)
