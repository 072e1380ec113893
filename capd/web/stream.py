"""Server-sent events: each client gets the newest state and never a queue, so a slow one costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

__all__ = ["HEARTBEAT_S", "MAX_CLIENTS", "Hub"]

MAX_CLIENTS = 64
HEARTBEAT_S = 15.0
_RETRY_MS = 2000


class Hub:
    """The newest state, and the clients that wait for it. All methods belong to the event loop's thread.

    A client that does not read is held in `send`. When it reads again, it gets the state of that time.
    """

    def __init__(self) -> None:
        self._newest = ""
        self._number = 0
        self._waiting: set[asyncio.Event] = set()
        self._ended = False

    @property
    def clients(self) -> int:
        """The number of open streams."""
        return len(self._waiting)

    def publish(self, text: str) -> None:
        """Make this one-line text the newest state."""
        self._newest, self._number = text, self._number + 1
        self._wake()

    def end(self) -> None:
        """End all streams, now and later."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        for event in self._waiting:
            event.set()

    def answer(self) -> Response:
        """Return the answer to a client: a stream, or a refusal if there are too many or the end has come."""
        if self._ended or self.clients >= MAX_CLIENTS:
            return PlainTextResponse(
                f"{MAX_CLIENTS} pages are open at most; close one\n", 503, {"Retry-After": "5"}
            )
        event = asyncio.Event()
        self._waiting.add(event)
        return _Stream(self._events(event), lambda: self._waiting.discard(event))

    async def _events(self, event: asyncio.Event) -> AsyncIterator[str]:
        sent = 0
        yield f"retry: {_RETRY_MS}\n\n"
        while not self._ended:
            if sent != self._number:
                sent = self._number
                yield f"id: {sent}\ndata: {self._newest}\n\n"
                continue
            event.clear()
            try:
                await asyncio.wait_for(event.wait(), HEARTBEAT_S)
            except TimeoutError:
                yield ": still here\n\n"


class _Stream(StreamingResponse):
    """A stream that gives its place back when its client has gone, even if it never began."""

    def __init__(self, events: AsyncIterator[str], left: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._left()
