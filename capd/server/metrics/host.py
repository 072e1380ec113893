"""The figures that the kernel has: of this process, of its encode threads, and of the store's file system."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FileSystem", "Process", "file_system", "process", "threads_cpu_s"]

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Process:
    """This process: CPU seconds, resident bytes, open descriptors, and its start in seconds since 1970."""

    cpu_s: float
    resident_nbytes: int
    open_fds: int
    started_s: float


@dataclass(frozen=True, slots=True)
class FileSystem:
    """The free space of a file system for users without privileges. inodes: None if it creates them as needed."""

    free_nbytes: int
    inodes: int | None


def process() -> Process:
    """Return the figures of this process."""
    return Process(
        cpu_s=time.process_time(),
        resident_nbytes=int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_NBYTES,
        # One of them is that of the listing itself.
        open_fds=len(os.listdir("/proc/self/fd")) - 1,
        started_s=_started_s(),
    )


@functools.cache
def _started_s() -> float:
    """Return the start in seconds since 1970. It is asked once: a step of the clock must not look like a restart."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return round(time.time() - uptime_s + int(fields[19]) / _TICKS, 1)


def threads_cpu_s(threads: Iterable[int]) -> float:
    """Return the CPU seconds of threads of this process. A thread that has ended counts nothing."""
    total = 0
    for thread in threads:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def file_system(directory: Path) -> FileSystem | None:
    """Return the free space at `directory`; None if its file system does not answer or it is gone."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return FileSystem(found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None)
