"""A proxy before an S3 server: it tells what was asked, and fails as a test wants it."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.parse
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from socketserver import BaseRequestHandler
from types import TracebackType
from typing import Any

from tests.kit.objects.faults import Faults, Request
from tests.kit.objects.relay import Relay
from tests.kit.objects.service import S3Service

__all__ = ["FaultProxy"]


class FaultProxy(S3Service):
    """A proxy on a port of its own, as a context manager.

    Attributes:
        endpoint: Its URL, for the client.
        faults: How it fails requests. A test may replace it at any time.
        requests: Every request since the start or the last `clear`.
        on_request: Called with each request before it is forwarded, in the thread of its connection.
    """

    def __init__(self, upstream: str, on_request: Callable[[Request], object] | None = None) -> None:
        self.upstream = urllib.parse.urlsplit(upstream).netloc
        self.faults = Faults()
        self.requests: list[Request] = []
        self.on_request = on_request
        self.stored_nbytes = 0
        self.stopping = threading.Event()
        self._concerned = 0
        self._failed = 0
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._port = 0
        self.start()
        super().__init__(f"http://127.0.0.1:{self._port}")

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Listen; after a `stop`, on the same port."""
        self.stopping.clear()
        self._server = _Server(("127.0.0.1", self._port), self)
        self._port = self._server.server_address[1]
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="fault-proxy")
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        """Cut every connection and refuse further ones. Not for `on_request`, whose thread it would wait for."""
        if self._server is None:
            return
        self.stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.cut_connections()
        self._server.server_close()
        self._server = None

    def clear(self) -> list[Request]:
        """Return the requests so far, and begin to count anew: also for `every`, `times` and `capacity_nbytes`."""
        with self._lock:
            seen, self.requests = self.requests, []
            self._concerned = self._failed = self.stored_nbytes = 0
        return seen

    def note(self, request: Request) -> None:
        """Keep a request that has just come."""
        with self._lock:
            self.requests.append(request)

    def count(self, request: Request) -> int:
        """The number of a request among those that the faults concern, from 1; 0 for another one."""
        if not self.faults.concerns(request):
            return 0
        with self._lock:
            self._concerned += 1
            return self._concerned

    def may_fail(self, request: Request, fault: str) -> bool:
        """Whether one more request may fail; it then bears the name of its fault."""
        with self._lock:
            if self.faults.times is not None and self._failed >= self.faults.times:
                return False
            self._failed += 1
        request.fault = fault
        return True

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes still fit, which are then taken."""
        limit = self.faults.capacity_nbytes
        with self._lock:
            if limit is not None and self.stored_nbytes + nbytes > limit:
                return False
            self.stored_nbytes += nbytes
            return True


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # server_close waits for them
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], proxy: FaultProxy) -> None:
        self._open: set[socket.socket] = set()
        self._proxy = proxy
        super().__init__(address, BaseRequestHandler)  # `finish_request` makes the relays

    def finish_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        try:
            Relay(request, client_address, self, self._proxy)
        except OSError:
            pass  # a cut connection is what tests ask for
        finally:
            self._open.discard(request)

    def cut_connections(self) -> None:
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
