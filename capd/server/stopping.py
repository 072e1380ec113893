"""The requests to stop: turns SIGTERM, SIGHUP, Ctrl-C and a tool's request into one event for the main thread."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopRequests"]

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
