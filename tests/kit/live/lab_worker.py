"""The process that measures for a daemon's lab."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from subprocess import Popen

__all__ = ["hurry", "worker_of"]


def worker_of(daemon: Popen[bytes] | None) -> int | None:
    """The process that measures for a daemon that runs; None if there is none."""
    assert daemon is not None
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words, status = (place / "cmdline").read_bytes(), (place / "stat").read_text()
        except OSError:
            continue
        if b"capd.lab.worker" in words and int(status.rpartition(")")[2].split()[1]) == daemon.pid:
            return int(place.name)
    return None


def hurry(daemon: Popen[bytes] | None) -> None:
    """Give the process an ordinary share of the CPU, if the system lets us: beside other tests none is left over."""
    worker = worker_of(daemon)
    if worker is None:
        return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, worker, 0)
        os.sched_setscheduler(worker, os.SCHED_OTHER, os.sched_param(0))
