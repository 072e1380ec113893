"""Decodes several chunks in parallel, on threads that live as long as one read.

Starting a thread costs some 50 µs. Decoding a chunk of a large record costs milliseconds. So a pool of idle threads
would save almost nothing. It would also need an end, and a new start in forked children.

The whole process has one limit. A read at that limit works on the calling thread alone. So does a read of a single
chunk.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable

__all__ = ["Job", "run_jobs"]

Job = Callable[[], None]

_MAX_THREADS = 16
# The number of helpers that this process may still start.
_free = threading.Semaphore(0)


def _reset() -> None:
    global _free
    _free = threading.Semaphore(min(_MAX_THREADS, len(os.sched_getaffinity(0))) - 1)


_reset()
os.register_at_fork(after_in_child=_reset)


def run_jobs(jobs: Iterable[Job]) -> None:
    """Run independent jobs and wait for all of them. Raises the first exception of a job."""
    todo = deque(jobs)
    failures: list[BaseException] = []
    helpers: list[threading.Thread] = []
    free = _free
    # No thread can be started if the interpreter ends or a limit is reached.
    with contextlib.suppress(RuntimeError):
        wanted = len(todo) - 1
        while len(helpers) < wanted and free.acquire(blocking=False):
            helper = threading.Thread(
                target=_help, args=(todo, failures, free), name="capd-read", daemon=True
            )
            try:
                helper.start()
            except BaseException:
                free.release()
                raise
            helpers.append(helper)
    try:
        _work(todo, failures)
    finally:
        for helper in helpers:
            helper.join()
    if failures:
        raise failures[0]


def _help(todo: deque[Job], failures: list[BaseException], free: threading.Semaphore) -> None:
    try:
        _work(todo, failures)
    finally:
        free.release()


def _work(todo: deque[Job], failures: list[BaseException]) -> None:
    try:
        while True:
            try:
                job = todo.popleft()
            except IndexError:
                return
            job()
    except BaseException as error:
        todo.clear()
        failures.append(error)
