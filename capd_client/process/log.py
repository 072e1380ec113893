"""The log of the training process: of warnings at most one per 20 s and reason, with the number held back.

What several ranks of a node say alike is one line (`capd_client.process.together`), unless the level is DEBUG.
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

__all__ = ["INTERVAL_S", "Notices", "logger", "show"]

logger = logging.getLogger("capd_client")

INTERVAL_S = 20.0


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]  # generic for type checkers only
    """In the place of logging's last resort, which swallows what a signal handler raises while it writes.

    As that, to what sys.stderr is just then, and silent once the job sets up logging of its own.
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
        """Called in the place of an exception: one that a signal handler of the job raised is no error of the log."""
        error = sys.exc_info()[1]
        if error is not None and is_interruption(error):
            raise error
        super().handleError(record)


_stderr = _Stderr()
logger.addHandler(_stderr)


def show(level: str) -> None:
    """Log from `level` on, to stderr where the job has set up no logging."""
    logger.setLevel(level)
    _stderr.setLevel(level)


def _say(level: int, text: str) -> None:
    """The rank that has the line has asked for its level already."""
    logger.handle(logger.makeRecord(logger.name, level, __file__, 0, "capd: %s", (text,), None))


_together = Together(_say)
atexit.register(_together.end)  # before the session's, so it runs after that
os.register_at_fork(after_in_child=_together.forked)


class Notices:
    """Rate-limits log lines by reason. A broken log handler does not reach training; a signal handler's error does."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def warn(self, reason: str, message: str, *args: object) -> None:
        """Log `message % args` unless `reason` was logged within the interval: then it is counted as held back."""
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
        """Log at INFO, not limited: only for things that happen at human pace."""
        self._write(logging.INFO, message, *args)

    def debug(self, message: str, *args: object) -> None:
        """Log at DEBUG, not limited: ask `logger.isEnabledFor` before where there is one per capture."""
        self._write(logging.DEBUG, message, *args)

    def _write(self, level: int, message: str, *args: object) -> None:
        if not logger.isEnabledFor(level):
            return
        try:
            info, text = find_rank(), message % args
            if logger.isEnabledFor(logging.DEBUG):
                _say(level, f"rank {info.rank}: {text}" if info.world_size > 1 else text)
            else:
                _together.tell(info, level, text)
        except Exception as error:  # the user's handler: nothing of it may reach the job
            if is_interruption(error):
                raise
            self._held["logging"] = self._held.get("logging", 0) + 1
