"""The log of the training process: at most one warning per 20 s and reason, with the number of suppressed ones.

A line that several ranks of a node log is written once (`capd_client.process.together`), unless the level is DEBUG.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from capd_client.process.ranks import find_rank
from capd_client.process.signals import is_interruption
from capd_client.process.together import Together

__all__ = ["INTERVAL_S", "RateLimitedLog", "logger", "show"]

logger = logging.getLogger("capd_client")

INTERVAL_S = 20.0


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]  # generic for type checkers only
    """A replacement for logging's last resort, which swallows what a signal handler raises while it writes.

    Like the last resort, it writes to the current sys.stderr, and is silent once the job sets up its own logging.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self, logging.WARNING)

    @property
    def stream(self) -> Any:
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers and logger.handlers == [self]:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Handle an error of `emit`, but re-raise it if a signal handler of the job raised it."""
        error = sys.exc_info()[1]
        if error is not None and is_interruption(error):
            raise error
        super().handleError(record)


_stderr = _Stderr()
logger.addHandler(_stderr)


def show(level: str) -> None:
    """Log from `level` on, to stderr unless the job has set up logging."""
    logger.setLevel(level)
    _stderr.setLevel(level)


def _say(level: int, text: str) -> None:
    """Log a line without asking for its level, which the rank that sent the line has done."""
    logger.handle(logger.makeRecord(logger.name, level, __file__, 0, "capd: %s", (text,), None))


_together = Together(_say)
# Registered before the session's function, so it runs after that one.
atexit.register(_together.end)
os.register_at_fork(after_in_child=_together.forked)


class RateLimitedLog:
    """The log lines of a part of capd, rate-limited by reason.

    An error of a log handler never reaches training; an error of the job's signal handler does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def warn(self, reason: str, message: str, *args: object) -> None:
        """Log `message % args`, unless `reason` was logged within the interval. Suppressed lines are counted."""
        now = self._clock()
        last = self._last.get(reason)
        if last is not None and now - last < INTERVAL_S:
            self._held[reason] = self._held.get(reason, 0) + 1
            return
        self._last[reason] = now
        held = self._held.pop(reason, 0)
        more = f" ({held} more like it since the last line)" if held else ""
        self._write(logging.WARNING, message + "%s", *args, more)

    def info(self, message: str, *args: object) -> None:
        """Log at INFO, without a limit: only for events at human pace."""
        self._write(logging.INFO, message, *args)

    def debug(self, message: str, *args: object) -> None:
        """Log at DEBUG, without a limit. For a line per capture, ask `logger.isEnabledFor` first."""
        self._write(logging.DEBUG, message, *args)

    def _write(self, level: int, message: str, *args: object) -> None:
        if not logger.isEnabledFor(level):
            return
        try:
            info, text = find_rank(), message % args
            if logger.isEnabledFor(logging.DEBUG):
                _say(level, f"rank {info.rank}: {text}" if info.world_size > 1 else text)
            else:
                _together.log(info, level, text)
        # An error of the user's handler may not reach the job.
        except Exception as error:
            if is_interruption(error):
                raise
            self._held["logging"] = self._held.get("logging", 0) + 1
