"""The requests to stop, and the outcome for those who asked.

SIGTERM, SIGHUP, Ctrl-C and a tool's request become one event for the main thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from capd_client.protocol.bounds import MAX_TEXT_CHARS
from capd_client.protocol.control import ControlReply

__all__ = ["StopReport", "StopRequests"]

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# A second Ctrl-C within this time is the first one, delivered twice.
_SAME_KEYPRESS_S = 0.3


class StopRequests:
    """A context manager of the main thread. Within it, signals do not interrupt; the thread waits for them.

    A hangup that was ignored (nohup) is still ignored. A pipe is used and not an Event, because a signal handler may
    run while the main thread holds an Event's lock.
    """

    def __init__(self, force: Callable[[], None]) -> None:
        """Prepare the pipe. A second Ctrl-C calls `force` in the signal handler."""
        self._force = force
        self._interrupted_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._read_end, self._write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.reason = ""

    def __enter__(self) -> StopRequests:
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        os.close(self._read_end)
        os.close(self._write_end)

    def request(self, reason: str) -> None:
        """Ask to stop. Any thread and a signal handler may call it."""
        self.reason = self.reason or reason
        # A full pipe already holds a request.
        with contextlib.suppress(OSError):
            os.write(self._write_end, b"s")

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for a request to stop. Return whether there was one."""
        return bool(select.select([self._read_end], [], [], timeout_s)[0])

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is not None and now - self._interrupted_at > _SAME_KEYPRESS_S:
                self._force()
            self._interrupted_at = self._interrupted_at or now
        self.request(signal.Signals(number).name)


class StopReport:
    """How the daemon ended: told once, after everything is sealed, to the tools that wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reply: ControlReply | None = None
        self._waiting = 0

    @contextlib.contextmanager
    def awaited(self, timeout_s: float) -> Iterator[Callable[[], ControlReply]]:
        """Wait for the outcome within the block, by calling what it yields. Enter it before the daemon stops."""
        with self._changed:
            self._waiting += 1
        try:
            yield lambda: self._take(timeout_s)
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    def tell(self, *, ok: bool, text: str, timeout_s: float = 1.0) -> None:
        """Tell the outcome, and wait until every tool has its answer."""
        with self._changed:
            self._reply = ControlReply("ok" if ok else "failed", text[:MAX_TEXT_CHARS])
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def _take(self, timeout_s: float) -> ControlReply:
        with self._changed:
            self._changed.wait_for(lambda: self._reply is not None, timeout_s)
            late = f"the daemon still stops after {timeout_s:g} s; it goes on"
            return self._reply or ControlReply("failed", late)
