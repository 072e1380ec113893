"""What runs in every worker of a cluster: its set-up, and the facts by which it is checked."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from distributed import WorkerPlugin

from capd._version import __version__
from capd.distributed.tasks.partial import FORMAT
from capd.distributed.tasks.reading import run_identity_of
from capd.errors import CapdError
from capd.server.heap import settle_heap
from capd.store.format.frames import FORMAT_VERSION

__all__ = ["SettledWorker", "TaskError", "facts_here", "guarded", "seen_here"]


class SettledWorker(WorkerPlugin):
    """Sets up the heap of a worker. Dask's nanny lets malloc give back each buffer, which doubles the time of a task.

    `is_own`: whether capd started the worker, which then leaves Ctrl-C to the command.
    """

    name = "capd-heap"

    def __init__(self, *, is_own: bool, settles: bool = True) -> None:
        self._is_own, self._settles = is_own, settles

    def setup(self, worker: Any) -> None:
        """Set up the process of a worker."""
        if self._is_own:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The heap is set up when everything is imported.
        for module in ("torch", "capd.distributed.tasks.running", "capd.distributed.tasks.products"):
            importlib.import_module(module)
        importlib.import_module("torch").set_num_threads(1)
        if self._settles:
            settle_heap()


class TaskError(CapdError):
    """A task failed on a worker; says with which error. Dask can send it, whatever the error holds."""


def guarded(version: str, function: Callable[..., bytes], *arguments: Any) -> bytes:
    """Return what a function returns. It runs on a worker, which may have joined after the check of versions.

    Dask cannot send an error with a deep traceback, and then never tells that the task has ended. Errors go without.

    Raises:
        CapdError: Raised by the function; or TaskError for any other error, or if the worker is not of this version.
        MemoryError: Raised by the function.
    """
    if version != __version__:
        raise TaskError(
            f"a worker on {os.uname().nodename} has capd {__version__} (here {version}); install the same versions "
            "everywhere"
        )
    failure: CapdError | MemoryError
    try:
        return function(*arguments)
    except CapdError as error:
        failure = error.with_traceback(None)
        failure.__cause__ = failure.__context__ = None
    except MemoryError:
        failure = MemoryError()
    except BaseException as error:
        failure = TaskError(f"a task failed on a worker: {type(error).__name__}: {error}")
    raise failure


def facts_here() -> dict[str, str]:
    """Return the versions that must be the same in all processes of an analysis."""
    return {
        "capd": __version__,
        "store format": str(FORMAT_VERSION),
        "partial format": str(FORMAT),
        "dask": metadata.version("dask"),
        "distributed": metadata.version("distributed"),
        "msgspec": metadata.version("msgspec"),
    }


def seen_here(places: Sequence[str]) -> dict[str, tuple[str, int] | str]:
    """Return the id and the records of each run as this process sees it, or why it does not."""
    found: dict[str, tuple[str, int] | str] = {}
    for place in places:
        try:
            found[place] = run_identity_of(place)
        except (CapdError, OSError) as error:
            found[place] = f"{error} (process {os.getpid()})"
    return found
