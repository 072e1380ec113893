"""A small HTTP server: one thread, a few connections, GET and HEAD, one answer for each connection.

It is for scrapes and nothing else. A connection has TIMEOUT_S, and a request MAX_REQUEST_NBYTES. At MAX_CONNECTIONS,
new ones wait in the socket's queue until the oldest had HOLD_S. So peers that say nothing delay others and never shut
them out. A reader costs nothing however slow it is: the kernel keeps the rest of its page.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

__all__ = ["HttpServer", "Request", "Response"]

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 4
MAX_REQUEST_NBYTES = 8 << 10
TIMEOUT_S = 5.0
HOLD_S = 0.25
# After its answer, a connection may finish what it sends.
_DRAIN_S = 1.0
_STOP_S = 2.0
# No descriptors are left: the queue waits so long.
_PAUSE_S = 0.5
_RECEIVE_NBYTES = 4 << 10
_REQUEST_LINE = re.compile(r"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.[01]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")


@dataclass(frozen=True, slots=True)
class Request:
    """A request. path: without the query. headers: by name in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. headers: further ones, by name."""

    status: HTTPStatus
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self, *, with_body: bool) -> bytes:
        """Return the bytes for the connection."""
        headers = {
            "Content-Type": self.content_type,
            "Content-Length": str(len(self.body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Connection": "close",
            **self.headers,
        }
        head = f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return head.encode() + b"\r\n" + (self.body if with_body else b"")

    @staticmethod
    def of(status: HTTPStatus, text: str, **headers: str) -> Response:
        """Return an answer of one line."""
        return Response(status, f"{text}\n".encode(), headers=headers)


@dataclass(slots=True)
class _Connection:
    sock: socket.socket
    since: float
    until: float
    received: bytearray = field(default_factory=bytearray)
    unsent: memoryview | None = None
    draining: bool = False


class HttpServer(threading.Thread):
    """The thread that serves a listening socket, which the caller made and closes."""

    def __init__(
        self, sock: socket.socket, answer: Callable[[Request], Response], *, name: str = "capd-http"
    ) -> None:
        """Prepare to serve. The caller starts the thread.

        Args:
            sock: A listening stream socket of any family.
            answer: Returns the answer to a request. It is called in this thread and must not wait.
            name: The name of the thread.
        """
        super().__init__(name=name, daemon=True)
        self._sock, self._answer = sock, answer
        self._ending = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # The oldest first.
        self._open: dict[int, _Connection] = {}
        self._accepting = False
        self._paused_until = 0.0
        self._failed = False

    def stop(self) -> None:
        """End the thread and its connections. The socket stays open.

        An answer that a dead file system holds up is not waited for: the thread then ends with the process.
        """
        os.eventfd_write(self._ending, 1)
        if self.ident is not None:
            self.join(_STOP_S)
        if not self.is_alive():
            os.close(self._ending)

    def run(self) -> None:
        """The thread's loop."""
        self._sock.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._ending, selectors.EVENT_READ)
            while True:
                self._watch(selector)
                ready = {key.fd for key, _ in selector.select(self._timeout_s())}
                if self._ending in ready:
                    break
                now = time.monotonic()
                for fd in list(self._open):
                    # A peer that never stops sending must not keep its place.
                    if self._open[fd].until <= now:
                        self._close(selector, self._open[fd])
                    elif fd in ready:
                        self._advance(selector, self._open[fd], now)
                if self._sock.fileno() in ready:
                    self._accept(selector, now)
            for connection in list(self._open.values()):
                self._close(selector, connection)

    # The queue of new connections

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Look at the queue only when the next connection could be taken."""
        wanted = time.monotonic() >= self._may_accept_at()
        if wanted != self._accepting:
            if wanted:
                selector.register(self._sock, selectors.EVENT_READ)
            else:
                selector.unregister(self._sock)
            self._accepting = wanted

    def _may_accept_at(self) -> float:
        if len(self._open) < MAX_CONNECTIONS:
            return self._paused_until
        return max(self._paused_until, next(iter(self._open.values())).since + HOLD_S)

    def _timeout_s(self) -> float | None:
        times = [connection.until for connection in self._open.values()]
        if not self._accepting:
            times.append(self._may_accept_at())
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _accept(self, selector: selectors.BaseSelector, now: float) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            # No descriptors or no memory are left. Ranks need them more.
            self._paused_until = now + _PAUSE_S
            return
        while len(self._open) >= MAX_CONNECTIONS:
            self._close(selector, next(iter(self._open.values())))
        sock.setblocking(False)
        connection = self._open[sock.fileno()] = _Connection(sock, now, now + TIMEOUT_S)
        selector.register(sock, selectors.EVENT_READ)
        # The request is often here already.
        self._advance(selector, connection, now)

    # One connection

    def _advance(self, selector: selectors.BaseSelector, connection: _Connection, now: float) -> None:
        try:
            if connection.draining:
                if not connection.sock.recv(_RECEIVE_NBYTES):
                    self._close(selector, connection)
                return
            if connection.unsent is None:
                self._receive(connection)
            if connection.unsent is not None:
                self._send(selector, connection, now)
        except BlockingIOError:
            pass
        except OSError:
            self._close(selector, connection)

    def _receive(self, connection: _Connection) -> None:
        """Read on. When the request is whole, or wrong, its answer is there. Raises OSError at the end."""
        data = connection.sock.recv(_RECEIVE_NBYTES)
        if not data:
            raise ConnectionResetError
        received = connection.received
        received += data
        head, end, _ = received.partition(b"\r\n\r\n")
        if len(head) > MAX_REQUEST_NBYTES:
            response = Response.of(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"a request has {MAX_REQUEST_NBYTES} bytes at most",
            )
        elif not end:
            return
        else:
            request = _parsed(bytes(head))
            response = (
                Response.of(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request")
                if request is None
                else self._answered(request)
            )
        with_body = not received.startswith(b"HEAD ")
        connection.unsent = memoryview(response.encode(with_body=with_body))

    def _answered(self, request: Request) -> Response:
        try:
            return self._answer(request)
        except Exception:
            # This is the outermost loop of the thread. The log must not fill up.
            if not self._failed:
                self._failed = True
                logger.exception("the answer to a request failed; further failures are not logged")
            return Response.of(
                HTTPStatus.INTERNAL_SERVER_ERROR, "the answer failed; the daemon's log says why"
            )

    def _send(self, selector: selectors.BaseSelector, connection: _Connection, now: float) -> None:
        assert connection.unsent is not None  # noqa: S101 - the caller has asked
        selector.modify(connection.sock, selectors.EVENT_WRITE)
        while connection.unsent:
            connection.unsent = connection.unsent[connection.sock.send(connection.unsent) :]
        # A socket that is closed with unread bytes takes back what it has sent.
        connection.sock.shutdown(socket.SHUT_WR)
        connection.draining = True
        connection.until = min(connection.until, now + _DRAIN_S)
        selector.modify(connection.sock, selectors.EVENT_READ)

    def _close(self, selector: selectors.BaseSelector, connection: _Connection) -> None:
        self._open.pop(connection.sock.fileno(), None)
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(connection.sock)
        connection.sock.close()


def _parsed(head: bytes) -> Request | None:
    """Return the request; None if it is none. The values of a repeated header are joined."""
    first, *lines = head.decode("latin-1").split("\r\n")
    found = _REQUEST_LINE.fullmatch(first)
    if found is None:
        return None
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            return None
        name = header[1].lower()
        headers[name] = f"{headers[name]}, {header[2]}" if name in headers else header[2]
    return Request(found[1], found[2].partition("?")[0], headers)
