"""The priority of threads on a busy node: the training's comes first, except while a rank is admitted."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

__all__ = ["PromptThread", "yield_to_training"]

_NICE = 10


def yield_to_training() -> None:
    """Lower the priority of the calling thread, and so of all threads that it starts."""
    with contextlib.suppress(OSError):
        # On Linux this affects the calling thread alone.
        os.nice(max(0, _NICE - os.nice(0)))


class PromptThread:
    """A thread with the priority of the process. It starts before `yield_to_training`, which nobody can undo.

    If the daemon accepted ranks with its lowered priority, it would get no turn once many ranks have begun to compute.
    """

    def __init__(self, name: str) -> None:
        self._work: Callable[[], None] | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], None]) -> None:
        """Run `work` in the thread."""
        self._work = work
        self._begun.set()

    def dismiss(self) -> None:
        """End the thread if no work has begun."""
        self._begun.set()

    def join(self) -> None:
        """Wait for the end of the work."""
        self._thread.join()

    def _run(self) -> None:
        self._begun.wait()
        if self._work is not None:
            self._work()
