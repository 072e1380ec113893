"""Runs the decoding of several chunks side by side, on threads that live as long as that one read.

Starting a thread costs some 50 µs, decoding a chunk of a large record milliseconds: a pool of idle threads would
save next to nothing, and would have to be ended, and made anew in forked children. The process as a whole has a
limit; a read that finds it reached works on the calling thread alone, and so does one of a single chunk.
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
_free = threading.Semaphore(0)  # helpers that may still be started in this process


def _reset() -> None:
    global _free
    _free = threading.Semaphore(min(_MAX_THREADS, len(os.sched_getaffinity(0))) - 1)


_reset()
os.register_at_fork(after_in_child=_reset)


def run_jobs(jobs: Iterable[Job]) -> None:
    """Run independent jobs; returns when none is at work any more. Raises the first exception that one raised."""
    todo = deque(jobs)
    failures: list[BaseException] = []
    helpers: list[threading.Thread] = []
    free = _free
    with contextlib.suppress(
        RuntimeError
    ):  # no thread can be had: the interpreter ends, or a limit is reached
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
