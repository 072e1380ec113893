"""The keeps of one run: which iterations are asked for, why a keep cannot be had, and how often one may ask."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from capd.server.recorder.keeps_file import KeepsFile
from capd.server.recorder.kept_ranges import KeptRange
from capd.server.recorder.window import AttemptWindow
from capd.store.keeps.keep import Keep

__all__ = ["KEEPS_PER_MINUTE", "MAX_KEEPS", "RunKeeps", "make_keep"]

logger = logging.getLogger(__name__)

MAX_KEEPS = 16_384
"""The keeps of one run. Beyond them, only the death of a rank and the end of the daemon keep as many again."""
KEEPS_PER_MINUTE = 20
"""The keeps of one rank. Keeps of iterations that are kept anyway do not count."""
_MINUTE_S = 60.0
_MAX_REASON_CHARS = 200


class RunKeeps:
    """The keeps of one run. The caller holds a lock, except while it writes them or looks for others'."""

    def __init__(self, file: KeepsFile, node: str, clock: Callable[[], float]) -> None:
        """Begin without any."""
        self.all: list[Keep] = []
        self._file, self._node, self._clock = file, node, clock
        # Keeps that are not in the file yet.
        self._unwritten: deque[Keep] = deque()
        # When each rank asked for the keeps of the last minute.
        self._asked: dict[str, deque[float]] = {}
        self._has_failed = False

    @property
    def is_written(self) -> bool:
        """Whether all keeps are in the file."""
        return not self._unwritten

    def earlier(self) -> list[Keep]:
        """Return the keeps of earlier daemons. Raises OSError."""
        return self._file.earlier()

    def ask(self, window: AttemptWindow, keep: Keep, asker: str, *, is_last: bool) -> str:
        """Keep a range of iterations.

        Args:
            window: The window of the attempt.
            keep: The keep.
            asker: The rank that asks; "" for all that have limits of their own.
            is_last: The rank or the daemon asks no more.

        Returns:
            Why nothing is kept; "" if it is.
        """
        if not keep.is_sound:
            return f"{keep.iteration} is no iteration"
        if window.kept.covers(keep.first, keep.last):
            return ""
        if not window.may_have(keep.first, keep.last):
            held = f"{min(window.iterations)} to {window.newest}" if window.iterations else "none"
            return f"iterations {keep.first} to {keep.last} are gone; held are {held}"
        if len(self.all) >= MAX_KEEPS * (1 + is_last):
            return f"this run has {len(self.all)} keeps already; write to another run"
        if asker and not self._may_ask(asker):
            return f"{asker} has asked for {KEEPS_PER_MINUTE} keeps within a minute; ask less often"
        self.note(window, keep)
        return ""

    def note(self, window: AttemptWindow, keep: Keep, *, is_new: bool = True) -> None:
        """Keep a range of iterations, unless it is kept. is_new: it is not in the file yet."""
        if len(self.all) >= 2 * MAX_KEEPS:
            return
        if not window.keep(KeptRange(keep.first, keep.last, keep.reason, keep.iteration)):
            return
        self.all.append(keep)
        if is_new:
            self._unwritten.append(keep)

    def _may_ask(self, asker: str) -> bool:
        now = self._clock()
        asked = self._asked.setdefault(asker, deque())
        while asked and now - asked[0] >= _MINUTE_S:
            asked.popleft()
        if len(asked) >= KEEPS_PER_MINUTE:
            return False
        asked.append(now)
        return True

    # For the recorder's thread, without the lock

    def write(self, run_id: str) -> None:
        """Write the new keeps, and tell the daemons of other nodes of this node's. What fails is tried again."""
        while self._unwritten:
            keep = self._unwritten[0]
            try:
                self._file.append(keep)
                if keep.node == self._node:
                    self._file.tell(keep)
            except OSError as error:
                if not self._has_failed:
                    logger.error("[window] run %s: a keep cannot be written, retrying: %s", run_id, error)
                self._has_failed = True
                return
            self._has_failed = False
            self._unwritten.popleft()
            logger.info(
                "[window] run %s: iterations %d to %d are kept (%s, iteration %d, node %s)",
                run_id, keep.first, keep.last, keep.reason, keep.iteration, keep.node,
            )  # fmt: skip

    def told(self) -> list[Keep]:
        """Return the keeps that other nodes have asked for since the last call."""
        return list(self._file.told())


def make_keep(reason: str, attempt: int, iteration: int, before: int, after: int, node: str) -> Keep:
    """Return a keep of the last `before` iterations up to one, and `after` that follow."""
    iteration = max(0, iteration)
    first = max(0, iteration - before + 1)
    return Keep(
        time.time_ns(), reason[:_MAX_REASON_CHARS], attempt, iteration, first, iteration + after, node
    )
