"""The time of a model: threads of real code that run one at a time, each with its own clock.

The thread with the earliest clock runs. It passes its turn on when it waits. So the effects of two threads on each
other are precise to the length of one turn. Real locks never block, as long as no thread holds one while it waits.
"""

from __future__ import annotations

import threading
import time
from typing import Optional

__all__ = ["Clock", "Task"]


class Task:
    """A thread of the model.

    now: its clock in µs. ends: the time at which its wait ends without a wake. woken: another thread ended the wait.
    """

    def __init__(self, clock: Clock, name: str) -> None:
        self.name = name
        self.now = clock.now
        self.ends = 0.0
        self.waiting = False
        self.done = False
        self.go = threading.Semaphore(0)


class Clock:
    """The clock of a model, and the turns of its threads."""

    def __init__(self) -> None:
        self.now = 0.0
        self._tasks: list[Task] = []
        self._here = threading.local()

    def enter(self, name: str) -> Task:
        """Make the calling thread a thread of the model. The first one runs, others wait for their turn."""
        task = Task(self, name)
        first = not self._tasks
        self._tasks.append(task)
        self._here.task = task
        if not first:
            task.go.acquire()
        return task

    @property
    def task(self) -> Optional[Task]:
        """The task of the calling thread. None if it is not a thread of the model."""
        return getattr(self._here, "task", None)

    def spend(self, us: float) -> None:
        """Keep the calling thread busy for `us`."""
        task = self.task
        if task is not None:
            task.now += us

    def rest(self, us: float, *, wakeable: bool = False) -> None:
        """Let the calling thread wait for `us`, or until `wake`. Others run meanwhile."""
        task = self.task
        assert task is not None
        task.ends = task.now + us
        task.waiting = wakeable
        self._next(task)
        task.now = max(task.now, task.ends)
        task.waiting = False

    def wake(self, task: Task) -> None:
        """End the rest of another thread now."""
        here = self.task
        if task.waiting and here is not None:
            task.ends = min(task.ends, max(here.now, task.now))

    def await_tasks(self, count: int) -> None:
        """Wait, in real time, until `count` threads have entered."""
        while len(self._tasks) < count:
            time.sleep(0.001)

    def leave(self) -> None:
        """End the calling thread's part in the model."""
        task = self.task
        assert task is not None
        task.done = True
        self._next(task, ended=True)

    def _next(self, task: Task, *, ended: bool = False) -> None:
        runnable = [one for one in self._tasks if not one.done]
        if not runnable:
            return
        chosen = min(runnable, key=lambda one: max(one.ends, one.now) if one is not task else task.ends)
        if chosen is not task:
            self.now = max(self.now, chosen.ends)
            chosen.go.release()
            if not ended:
                task.go.acquire()
