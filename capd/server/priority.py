"""Whose turn it is on a busy node: the training's, but for the moments in which a rank is taken."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

__all__ = ["PromptThread", "yield_to_training"]

_NICE = 10


def yield_to_training() -> None:
    """Lower the priority of the calling thread, and so of all that it starts."""
    with contextlib.suppress(OSError):
        os.nice(max(0, _NICE - os.nice(0)))  # Linux: of this thread alone


class PromptThread:
    """A thread with the priority of the process, made before `yield_to_training`: nobody can raise it afterwards.

    A daemon that accepts ranks with the priority that it works with gets no turn among many that have begun to compute.
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
        """If no work has begun, none will."""
        self._begun.set()

    def join(self) -> None:
        """Wait for the end of the work."""
        self._thread.join()

    def _run(self) -> None:
        self._begun.wait()
        if self._work is not None:
            self._work()
