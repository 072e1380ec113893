"""A command's connection to the daemon: one reply for each request. Every failure is an EndpointError."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from capd.errors import EndpointError
from capd_client.protocol.control import Control, ControlReply, Stats, StatsReply
from capd_client.protocol.messages import (
    MAX_FRAME_NBYTES,
    TOOL_BYTE,
    ClientMessage,
    DaemonMessage,
    Ping,
    Reject,
    decode_daemon,
    encode,
)

if TYPE_CHECKING:
    from capd.metrics import DaemonStats

__all__ = ["Tool", "connect", "wait_until_ready"]

REPLY_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 3.0
_Reply = TypeVar("_Reply")
_STOPPED = "it is stopped (SIGSTOP; `kill -CONT` continues it) or very busy, see its log"


class Tool:
    """An open tool connection. `request` may be called any number of times."""

    def __init__(self, connection: Connection, path: Path) -> None:
        self._connection = connection
        self._path = path

    def request(self, message: ClientMessage, timeout_s: float = REPLY_TIMEOUT_S) -> DaemonMessage:
        """Send a message and return its reply. Raises EndpointError if no reply comes or the daemon refuses."""
        try:
            self._connection.send_bytes(encode(message))
            if not self._connection.poll(timeout_s):
                raise EndpointError(
                    f"the daemon at {self._path} did not answer within {timeout_s:g} s: {_STOPPED}; "
                    "the request may still be carried out"
                )
            reply = decode_daemon(self._connection.recv_bytes(MAX_FRAME_NBYTES))
        except (OSError, EOFError) as error:
            raise EndpointError(f"the daemon at {self._path} closed the connection: {error}") from error
        except msgspec.DecodeError as error:
            raise EndpointError(f"{self._path} does not speak capd's protocol: {error}") from error
        if isinstance(reply, Reject):
            raise EndpointError(f"the daemon at {self._path} refused: {reply.message}")
        return reply

    def stats(self, run_id: str | None = None, timeout_s: float = REPLY_TIMEOUT_S) -> DaemonStats:
        """Return the daemon's counters, of one run or of all.

        Raises:
            EndpointError: If the daemon does not answer, or has the counters of another version.
        """
        from capd.metrics import DaemonStats

        reply = self._reply(StatsReply, Stats(run_id), timeout_s)
        try:
            return DaemonStats.model_validate(reply.stats)
        except ValueError as error:
            raise EndpointError(
                "the daemon's counters have another layout; run the daemon's capd version"
            ) from error

    def control(self, message: Control, timeout_s: float) -> ControlReply:
        """Send an order and return the answer. Raises EndpointError."""
        return self._reply(ControlReply, message, timeout_s)

    def wait_end(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the end of the connection, which is the end of the daemon."""
        with contextlib.suppress(OSError, EOFError):
            if self._connection.poll(timeout_s):
                self._connection.recv_bytes(MAX_FRAME_NBYTES)

    def _reply(self, kind: type[_Reply], message: ClientMessage, timeout_s: float) -> _Reply:
        reply = self.request(message, timeout_s)
        if not isinstance(reply, kind):
            raise EndpointError(
                f"the daemon answered with {type(reply).__name__}, not {kind.__name__}; is it another capd version?"
            )
        return reply


@contextlib.contextmanager
def connect(path: Path) -> Iterator[Tool]:
    """Connect to the daemon at `path`. Raises EndpointError with the path and the remedy."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(_CONNECT_TIMEOUT_S)
        sock.connect(os.fspath(path))
        sock.settimeout(None)
        sock.sendall(TOOL_BYTE)
    except (TimeoutError, BlockingIOError) as error:
        # A daemon listens, but its queue of connections is full.
        sock.close()
        raise EndpointError(f"the daemon at {path} takes no connection: {_STOPPED}") from error
    except OSError as error:
        sock.close()
        raise EndpointError(
            f"no daemon at {path}: {error.strerror or error}; start `capd serve`, or set CAPD_ENDPOINT"
        ) from error
    connection = Connection(sock.detach())
    try:
        yield Tool(connection, path)
    finally:
        connection.close()


def wait_until_ready(path: Path, ended: Callable[[], bool], limit_s: float) -> EndpointError | None:
    """Wait until the daemon at `path` answers, until `ended` says that it has ended, or for `limit_s`.

    Returns:
        None if the daemon answers, otherwise the last error.
    """
    until = time.monotonic() + limit_s
    while True:
        try:
            with connect(path) as tool:
                tool.request(Ping())
            return None
        except EndpointError as error:
            if ended() or time.monotonic() > until:
                return error
        time.sleep(0.02)
