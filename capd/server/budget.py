"""What the daemon may use: disk space for records, threads for encoding, open files.

Limits are looked up before they are used and respect cgroups (v1 and v2), CPU affinity and RLIMITs.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

from capd.amounts import amount_nbytes

__all__ = ["DiskBudget", "default_max_disk", "encode_threads", "raise_open_files", "usable_cpus"]

_REFRESH_S = 1.0
_DEFAULT_MAX_DISK = 200 * 10**9
_CGROUP = Path("/sys/fs/cgroup")


def default_max_disk(root: Path) -> int:
    """min(200 GB, half of what is free now on the file system of `root`), in bytes."""
    found = os.statvfs(root)
    return min(_DEFAULT_MAX_DISK, found.f_bavail * found.f_frsize // 2)


class DiskBudget:
    """Says whether one more record may be written.

    max_disk: bytes this daemon may add to the store, None for no limit. keep_free: what must stay free on
    the file system, as a fraction of its size (a float below 1) or in bytes (an int). Free space and stored
    bytes are read at most once per second; in between every admitted record counts with its raw size, so the
    limits err on the safe side.
    """

    def __init__(self, root: Path, max_disk: int | None, keep_free: int | float) -> None:
        self.root = root
        self.max_disk = max_disk
        self.keep_free = keep_free
        self.stored: Callable[[], int] = lambda: 0  # bytes stored so far; set by the daemon
        self._lock = threading.Lock()
        self._until = 0.0
        self._room = 0
        self._why = ""

    def refusal(self, nbytes: int) -> str | None:
        """None if `nbytes` more may be written, else the text for the NACK, naming the limit to raise."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._refresh()
            if nbytes > self._room:
                return self._why
            self._room -= nbytes
            return None

    def free_nbytes(self) -> int:
        """Bytes a user may still write to the file system of the store."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def keep_free_nbytes(self) -> int:
        """keep_free in bytes."""
        found = os.statvfs(self.root)
        return amount_nbytes(self.keep_free, found.f_blocks * found.f_frsize)

    def _refresh(self) -> None:
        self._until = time.monotonic() + _REFRESH_S
        try:
            found = os.statvfs(self.root)
        except OSError as error:
            self._room, self._why = -1, f"the store's file system does not answer: {error}"
            return
        free = found.f_bavail * found.f_frsize
        kept = amount_nbytes(self.keep_free, found.f_blocks * found.f_frsize)
        self._room = free - kept
        self._why = (
            f"{free / 1e9:.2f} GB free on the store's disk, {kept / 1e9:.2f} GB are kept free; "
            f"make room or lower --keep-free"
        )
        if self.max_disk is not None:
            stored = self.stored()
            if self.max_disk - stored < self._room:
                self._room = self.max_disk - stored
                self._why = (
                    f"{stored / 1e9:.2f} GB stored of at most {self.max_disk / 1e9:.2f} GB; raise --max-disk"
                )


def usable_cpus() -> float:
    """CPUs this process may use: its affinity, cut by the cgroup's quota (a fraction is possible)."""
    allowed = float(len(os.sched_getaffinity(0)))
    for quota in (_quota_v2(), _quota_v1()):
        if quota is not None:
            allowed = min(allowed, quota)
    return allowed


def encode_threads() -> int:
    """Encode threads of one daemon: a quarter of the usable CPUs, at least 1, at most 16."""
    return max(1, min(16, round(usable_cpus() / 4)))


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one; returns the limit that now holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def _quota_v2() -> float | None:
    group = _cgroup_path("")
    if group is None:
        return None
    quotas: list[float] = []
    here = _CGROUP / group
    while True:  # an ancestor may be tighter
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (here / "cpu.max").read_text().split()
            quotas.append(float(quota) / float(period))
        if here == _CGROUP or _CGROUP not in here.parents:
            return min(quotas, default=None)
        here = here.parent


def _quota_v1() -> float | None:
    group = _cgroup_path("cpu")
    for directory in (_CGROUP / "cpu" / (group or ""), _CGROUP / "cpu"):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quota = int((directory / "cpu.cfs_quota_us").read_text())
            period = int((directory / "cpu.cfs_period_us").read_text())
            return quota / period if quota > 0 else None
    return None


def _cgroup_path(controller: str) -> str | None:
    """This process's group below the mount of a v1 controller, or of v2 (controller "")."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return path.strip("/")
    return None
