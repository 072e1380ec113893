"""A `capd web` process, its link, and a client that has its cookie."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from tests.kit import forking
from tests.kit.daemon import PATIENCE_S, wait_for

__all__ = ["WebAnswer", "WebPage", "web_page"]


@dataclass
class WebAnswer:
    """One answer. headers: by name in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class _OverUnix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class WebPage:
    """`capd web STORE` with its output in files; answers once constructed."""

    def __init__(
        self,
        store: Path,
        outputs: Path,
        *options: str | Path,
        endpoint: Path | None = None,
        uds: Path | None = None,
    ) -> None:
        self.store, self.uds, self.cookie = store, uds, ""
        self._out, self._err = outputs / "web-out", outputs / "web-err"
        where = ("--port", "0") if uds is None and "--port" not in options else ()
        given = () if uds is None else ("--uds", uds)
        command = [sys.executable, "-m", "capd", "web", store, *where, *given, "--no-browser", *options]
        environ = {**os.environ, "CAPD_ENDPOINT": f"unix:{endpoint or outputs / 'no-daemon.sock'}"}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = forking.popen(list(map(str, command)), stdout=out, stderr=err, env=environ)
        wait_for(lambda: "ssh -L" in self.out() or self.process.poll() is not None, "page ready")
        assert self.process.poll() is None, self.err()

    def out(self) -> str:
        return self._out.read_text()

    def err(self) -> str:
        return self._err.read_text()

    @property
    def link(self) -> str:
        """The link that was printed first."""
        return self.out().splitlines()[0]

    @property
    def address(self) -> str:
        """The link without the token."""
        return self.link.partition("?")[0]

    @property
    def port(self) -> int:
        return int(urlsplit(self.address).port or 0)

    def connection(self) -> http.client.HTTPConnection:
        if self.uds is not None:
            return _OverUnix(self.uds)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def get(self, path: str = "/", method: str = "GET", **headers: str) -> WebAnswer:
        """One request. headers: with underscores in place of hyphens; the cookie goes along unless one is given."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.cookie and "Cookie" not in sent:
            sent["Cookie"] = self.cookie
        connection = self.connection()
        try:
            connection.request(method, path, headers={name: value for name, value in sent.items() if value})
            found = connection.getresponse()
            return WebAnswer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())
        finally:
            connection.close()

    def enter(self, token: str = "") -> WebAnswer:
        """Use the link, and keep the cookie."""
        found = self.get(f"/?token={token or re.findall('token=(.*)', self.out() + self.err())[-1]}")
        self.cookie = found.headers.get("set-cookie", "").partition(";")[0]
        return found

    def ask(self, name: str, **query: Any) -> Any:
        """The answer of the page's own questions."""
        found = self.get(f"/api/{name}?{urlencode(query, doseq=True)}")
        assert found.status == 200, (found.status, found.body)
        return found.json

    @contextlib.contextmanager
    def stream(self) -> Iterator[Iterator[Any]]:
        """The states that the page is sent, as they come."""
        connection = self.connection()
        connection.request("GET", "/events", headers={"Cookie": self.cookie})
        answer = connection.getresponse()
        assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")

        def states() -> Iterator[Any]:
            for line in answer:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

        try:
            yield states()
        finally:
            connection.close()

    def memory_nbytes(self) -> int:
        """The most memory that the process has had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = PATIENCE_S) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


@contextlib.contextmanager
def web_page(
    store: Path, outputs: Path, *options: str | Path, enter: bool = True, **more: Any
) -> Iterator[WebPage]:
    """A page that does not outlive the block, and a client that is in."""
    page = WebPage(store, outputs, *options, **more)
    try:
        if enter:
            assert page.enter().status == 303
        yield page
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if page.process.poll() is None:
                page.stop(timeout_s=10)
        page.process.kill()
        page.process.wait()
