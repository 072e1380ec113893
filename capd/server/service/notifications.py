"""The notifications of systemd's `Type=notify`: ready, status, watchdog, stopping.

The protocol is one datagram for each message, to the socket that NOTIFY_SOCKET names. Without that variable every call
does nothing.

The watchdog is fed by the progress of the append thread, and not by a timer: a daemon that no longer commits records
is restarted. A seal of thousands of shards or a slow disk is no reason for a restart, because the next daemon would
have the same work before it. Between two checkpoints, the thread therefore also counts as alive while it computes, or
while the kernel has it wait for the disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

__all__ = ["Notifications", "Worker"]

logger = logging.getLogger(__name__)

_STATUS_S = 5.0
# A manager that takes nothing must not hold up the daemon.
_SEND_TIMEOUT_S = 1.0
# While the daemon stops: the time between two looks at its progress, and the time that a look with progress gains.
_STOP_LOOK_S = 1.0
# In /proc/…/stat: a state, and the places of two fields, counted from it.
_UNINTERRUPTIBLE = "D"
_USER_TICKS, _SYSTEM_TICKS = 11, 12
_STOP_GAIN_S = 15


class Worker(Protocol):
    """The thread whose progress decides whether the daemon is alive."""

    checkpoints: int
    """A number that grows while the thread works, and while it waits for work."""

    @property
    def native_id(self) -> int | None:
        """The kernel's number of the thread."""


class Notifications:
    """The messages to the service manager. As a context manager it closes its socket."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Take the variables of the service manager out of the environment, so that no child process uses them."""
        address = environ.pop("NOTIFY_SOCKET", "")
        watchdog_us, watchdog_pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        self._socket: socket.socket | None = None
        # An address that is neither a path nor abstract is none of systemd's.
        if address.startswith(("/", "@")):
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.settimeout(_SEND_TIMEOUT_S)
        mine = watchdog_pid in ("", str(os.getpid()))
        self._watchdog_s = int(watchdog_us) / 1e6 if mine and _is_number(watchdog_us) else 0.0
        self._fed_at, self._status_at = 0.0, 0.0
        # The checkpoints and the CPU time of the worker at the last look.
        self._seen = (-1, 0)
        self._stopped = threading.Event()
        self._stopping: threading.Thread | None = None

    def __enter__(self) -> Notifications:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._stopping is not None:
            self._stopping.join()
        if self._socket is not None:
            self._socket.close()

    def ready(self) -> None:
        """Report that ranks can connect."""
        self._send("READY=1")

    def tick(self, worker: Worker, status: Callable[[], str]) -> None:
        """Feed the watchdog if `worker` made progress, and send `status()` every few seconds. Call it often."""
        if self._socket is None:
            return
        now = time.monotonic()
        # systemd asks for half of its time.
        if self._watchdog_s and now - self._fed_at >= self._watchdog_s / 2 and self._progressed(worker):
            self._fed_at = now
            self._send("WATCHDOG=1")
        if now - self._status_at >= _STATUS_S:
            self._status_at = now
            self._send(f"STATUS={status()}")

    def stopping(self, worker: Worker, within_s: float) -> None:
        """Report that the daemon stops. For `within_s` a thread asks for more time as long as `worker` progresses.

        A worker that waits for work progresses, too. After `within_s` the manager's own time limit therefore holds.
        """
        self._send("STOPPING=1")
        if self._socket is None:
            return
        self._stopping = threading.Thread(
            target=self._ask_for_time,
            args=(worker, time.monotonic() + within_s),
            name="capd-notify",
            daemon=True,
        )
        # Without a further thread, the manager's own time limit holds.
        with contextlib.suppress(RuntimeError):
            self._stopping.start()
            return
        self._stopping = None

    def _ask_for_time(self, worker: Worker, until: float) -> None:
        while time.monotonic() < until:
            if self._progressed(worker):
                self._send(f"EXTEND_TIMEOUT_USEC={_STOP_GAIN_S * 1_000_000}\nWATCHDOG=1")
            if self._stopped.wait(_STOP_LOOK_S):
                return

    def _progressed(self, worker: Worker) -> bool:
        """Return whether the worker passed a checkpoint or computed since the last answer, or waits for the disk."""
        state, cpu_ticks = _thread_state(worker.native_id)
        seen, self._seen = self._seen, (worker.checkpoints, cpu_ticks)
        return seen != self._seen or state == _UNINTERRUPTIBLE

    def _send(self, message: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(message.encode(), self._address)
        except OSError as error:
            logger.debug("the service manager was not notified: %s", error)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _thread_state(thread: int | None) -> tuple[str, int]:
    """Return the state of a thread of this process as proc(5) names it, and its CPU time; "" and 0 if it has ended."""
    try:
        stat = Path(f"/proc/self/task/{thread}/stat").read_text()
    except OSError:
        return "", 0
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
