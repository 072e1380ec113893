"""What runs in every worker of a cluster: its set-up, and the facts by which it is checked."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from distributed import WorkerPlugin

from capd._version import __version__
from capd.distributed.tasks.partial import FORMAT
from capd.distributed.tasks.reading import run_identity_of
from capd.errors import CapdError
from capd.server.heap import settle_heap
from capd.store.format.frames import FORMAT_VERSION

__all__ = ["SettledWorker", "facts_here", "seen_here"]


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
