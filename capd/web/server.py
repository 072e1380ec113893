"""The server of the page: uvicorn on a socket that listens already, and an end that does not wait for open pages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

import uvicorn

from capd.web.access import Door, Guard
from capd.web.application import Application

__all__ = ["serve"]

_NICE = 10
# What is still open after this is cut off: a client that reads nothing keeps its connection for ever.
_END_S = 1
_MAX_CONNECTIONS = 256
_MAX_HEADERS_NBYTES = 64 << 10


class _Server(uvicorn.Server):
    """Ends the streams before it waits for its connections."""

    def __init__(self, config: uvicorn.Config, application: Application, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._application, self._ready = application, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._sampling = asyncio.create_task(self._application.sample_forever())
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._sampling.cancel()
        self._application.hub.end()
        await super().shutdown(sockets)


def serve(
    application: Application, door: Door, sock: socket.socket, root_path: str, ready: Callable[[], None]
) -> None:
    """Serve until SIGTERM or Ctrl-C, which this process then gets again.

    Args:
        application: The page.
        door: What requests must have.
        sock: A listening socket.
        root_path: The path below which a proxy shows the page.
        ready: Called when requests are answered.
    """
    # The training on this machine comes first.
    with contextlib.suppress(OSError):
        os.nice(max(0, _NICE - os.nice(0)))
    config = uvicorn.Config(
        Guard(application.starlette, door),
        loop="asyncio", http="h11", ws="none", lifespan="off", root_path=root_path, proxy_headers=False,
        server_header=False, access_log=False, log_level="critical", limit_concurrency=_MAX_CONNECTIONS,
        h11_max_incomplete_event_size=_MAX_HEADERS_NBYTES, timeout_graceful_shutdown=_END_S,
    )  # fmt: skip
    try:
        _Server(config, application, ready).run([sock])
    finally:
        application.close()
