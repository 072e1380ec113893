"""Time that a model keeps: threads of real code of which one runs at a time, each with a clock of its own.

The one whose clock is behind runs; it gives its turn away where it waits. So what two threads do to each other is seen
to the length of one turn, and real locks are never waited for as long as none is held in a wait.
"""

from __future__ import annotations

import threading
import time
from typing import Optional

__all__ = ["Clock", "Task"]


class Task:
    """One thread. now: its clock in µs. ends: when what it waits for comes by itself; woken: somebody ended it."""

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
        """Make the calling thread one of the model's. The first one runs, others wait for their turn."""
        task = Task(self, name)
        first = not self._tasks
        self._tasks.append(task)
        self._here.task = task
        if not first:
            task.go.acquire()
        return task

    @property
    def task(self) -> Optional[Task]:
        """The calling thread's; None where it is none of the model's."""
        return getattr(self._here, "task", None)

    def spend(self, us: float) -> None:
        """The calling thread is busy for so long."""
        task = self.task
        if task is not None:
            task.now += us

    def rest(self, us: float, *, wakeable: bool = False) -> None:
        """The calling thread waits for so long, or until `wake`; others run meanwhile."""
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
        """Wait, in real time, until so many threads have entered."""
        while len(self._tasks) < count:
            time.sleep(0.001)

    def leave(self) -> None:
        """The calling thread is through."""
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
