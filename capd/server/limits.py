"""The limits of the daemon: disk space and inodes, memory for captures in work, encode threads, open files.

The limits respect cgroups (v1 and v2), CPU affinity and RLIMITs.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from capd.space import mount_of, shown_size
from capd_client.config.sizes import amount_nbytes
from capd_client.process.memory import available_nbytes

__all__ = ["DiskBudget", "encode_threads", "raise_open_files", "staging_within", "usable_cpus"]

_REFRESH_S = 1.0
_REFUSED_S = 60.0
# The divisor of the available memory; other processes need some of it, too.
_STAGING_SHARE = 4
# For groups, array, metadata, the `.partial` file, and sealing.
_NEW_SERIES_INODES = 16
# A part of _NEW_SERIES_INODES: directories of the shard, and metadata before its rename.
_SEAL_INODES = 8
_MIN_KEPT_INODES = 512
_CGROUP = Path("/sys/fs/cgroup")


class _Seen(NamedTuple):
    """The state of the disk at one look, in bytes. by_max_disk: max_disk is the nearer limit, not keep_free."""

    free: int = 0
    total: int = 0
    reserved: int = 0
    stored: int = 0
    by_max_disk: bool = False


class DiskBudget:
    """The disk budget of one daemon: decides whether one more record may be written.

    The file system is asked at most once per second. Between two looks every admitted record counts with its raw size.
    A record that is not written yet counts after the next look, too. The limits therefore err on the safe side.
    """

    def __init__(
        self, root: Path, max_disk: int | None, keep_free: int | float, *, is_default: bool = False
    ) -> None:
        """Watch the file system of `root`.

        Args:
            root: The directory of the store.
            max_disk: The bytes that this daemon may add to the store and hold; None for no limit. A restarted daemon
                starts at zero. Shards that were moved to an object store count no more.
            keep_free: The space that stays free on the file system: a fraction of its size (a float up to 1), or bytes
                (an int). The same share of its inodes stays free, at least 512. With 0, no inodes are kept.
            is_default: No user has set max_disk.
        """
        self.root = root
        self._is_default = is_default
        self.max_disk = max_disk
        self.keep_free = keep_free
        # The daemon sets all three: bytes stored so far; series not sealed yet; bytes and new series not written yet.
        self.stored: Callable[[], int] = lambda: 0
        self.unsealed: Callable[[], int] = lambda: 0
        self.waiting: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._lock = threading.Lock()
        self._until = 0.0
        self._identity = self._identify()
        self._mount = mount_of(root)
        # `_pending` counts bytes that were being written at the last look or were admitted since.
        self._room, self._pending = 0, 0
        self._seen = _Seen()
        # The time of the newest refusal; None if a record was admitted since.
        self._refused_at: float | None = None
        # The reason why the store takes nothing, however much space is free.
        self._broken = ""
        # None if the file system has no inodes to count.
        self._inode_room: int | None = None
        self._inode_why = ""

    def refusal(self, nbytes: int, *, new_series: int = 0) -> str | None:
        """Admit `nbytes` and return None, or return the text of the NACK. The text names the limit and the remedy.

        Each of the `new_series` that these records open takes inodes.
        """
        inodes = _NEW_SERIES_INODES * new_series
        with self._lock:
            if time.monotonic() >= self._until:
                self._look()
            if nbytes > self._room:
                self._refused_at = time.monotonic()
                return self._byte_refusal(nbytes)
            if self._inode_room is not None:
                if inodes > self._inode_room:
                    self._refused_at = time.monotonic()
                    return self._inode_why
                self._inode_room -= inodes
            self._room -= nbytes
            self._pending += nbytes
            self._refused_at = None
            return None

    @property
    def refuses(self) -> bool:
        """Whether the newest record was refused, in the last minute. Takes no lock."""
        refused_at = self._refused_at
        return refused_at is not None and time.monotonic() - refused_at < _REFUSED_S

    def _byte_refusal(self, nbytes: int) -> str:
        if self._broken:
            return self._broken
        seen, pending = self._seen, self._pending
        what = f"a record of {shown_size(nbytes)}" if nbytes else "every record"
        place = f"on the file system {self._mount} of the store {self.root}"
        free = f"{shown_size(max(0, seen.free - pending))} of {shown_size(seen.total)} are free {place}"
        if self.max_disk is not None and seen.by_max_disk:
            used, default = shown_size(seen.stored + pending), " by default" if self._is_default else ""
            return (
                f"max_disk refuses {what}: {used} of the {shown_size(self.max_disk)} that this daemon may add{default} "
                f"are stored or being written, {free}; raise CAPD_MAX_DISK (--max-disk)"
            )
        # Otherwise it would not help to keep nothing free.
        if seen.reserved and nbytes < seen.free - pending:
            remedy = "make room there, or lower CAPD_KEEP_FREE (--keep-free)"
            return f"keep_free refuses {what}: {free}, {shown_size(seen.reserved)} stay free; {remedy}"
        return f"the full disk refuses {what}: {free}; make room there, or use a store on another file system"

    def free_nbytes(self) -> int:
        """Return the bytes that a user can still write to the file system of the store."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def keep_free_nbytes(self) -> int:
        """Return keep_free in bytes."""
        return self._reserved_nbytes(os.statvfs(self.root))

    def _look(self) -> None:
        self._until = time.monotonic() + _REFRESH_S
        # Asked first: bytes written in the meantime then count twice, never zero times.
        nbytes, series = self.waiting()
        try:
            found = os.statvfs(self.root)
        except OSError as error:
            self._room = -1
            self._broken = f"the store {self.root} does not answer: {error.strerror}; check its disk or mount"
            return
        if self._identify() != self._identity:
            # The open files have no names any more.
            self._room = -1
            self._broken = f"the store {self.root} was removed and created again; restart `capd serve`"
            return
        self._broken = ""
        self._look_at_bytes(found, nbytes)
        self._look_at_inodes(found, series)

    def _identify(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            found = os.stat(self.root)
            return found.st_dev, found.st_ino
        return None

    def _look_at_bytes(self, found: os.statvfs_result, waiting_nbytes: int) -> None:
        free, reserved = found.f_bavail * found.f_frsize, self._reserved_nbytes(found)
        room, stored, by_max_disk = free - reserved, 0, False
        if self.max_disk is not None:
            stored = self.stored()
            by_max_disk = self.max_disk - stored < room
            room = min(room, self.max_disk - stored)
        self._seen = _Seen(free, found.f_blocks * found.f_frsize, reserved, stored, by_max_disk)
        self._room, self._pending = room - waiting_nbytes, waiting_nbytes

    def _look_at_inodes(self, found: os.statvfs_result, waiting_series: int) -> None:
        if found.f_files == 0:
            # btrfs and other file systems create inodes as needed.
            self._inode_room = None
            return
        share = self._reserved_nbytes(found) / max(1, found.f_blocks * found.f_frsize)
        kept = max(_MIN_KEPT_INODES, int(share * found.f_files)) if share else 0
        to_seal = self.unsealed() * _SEAL_INODES
        usable = found.f_favail - to_seal - waiting_series * _NEW_SERIES_INODES
        self._inode_room = usable - kept
        refuser = "keep_free" if kept and usable >= _NEW_SERIES_INODES else "the full disk"
        self._inode_why = (
            f"{refuser} refuses a new series: {found.f_favail:,} inodes free of {found.f_files:,} on the file system "
            f"{self._mount} of the store {self.root}, {kept:,} are kept free and {to_seal:,} for sealing; delete files "
            f"there, or use a store on a file system with more inodes"
        )

    def _reserved_nbytes(self, found: os.statvfs_result) -> int:
        return amount_nbytes(self.keep_free, found.f_blocks * found.f_frsize)


def staging_within(asked_nbytes: int) -> int:
    """Return `asked_nbytes`, or less if the machine or the cgroup has too little memory for the staging buffers."""
    return min(asked_nbytes, available_nbytes() // _STAGING_SHARE)


def usable_cpus() -> float:
    """Return the CPUs that this process may use: its affinity, cut by the cgroup's quota (a fraction is possible)."""
    version_2 = _quotas(_CGROUP, _cgroup_path(""), "cpu.max")
    version_1 = _quotas(_CGROUP / "cpu", _cgroup_path("cpu"), "cpu.cfs_quota_us", "cpu.cfs_period_us")
    return min([float(len(os.sched_getaffinity(0))), *version_2, *version_1])


def encode_threads() -> int:
    """Return the number of encode threads of one daemon: a quarter of the usable CPUs, from 1 to 16."""
    return max(1, min(16, round(usable_cpus() / 4)))


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one. Return the limit that now holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def _quotas(base: Path, group: str | None, *files: str) -> list[float]:
    """Return the quotas of a group and of its ancestors below `base`, of which any may be the tightest."""
    found: list[float] = []
    here = base / (group or "")
    for directory in (here, *here.parents):
        if directory.is_relative_to(base):
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                quota, period = " ".join((directory / file).read_text() for file in files).split()
                if float(quota) > 0:
                    found.append(float(quota) / float(period))
    return found


def _cgroup_path(controller: str) -> str | None:
    """Return this process's group below the mount of a v1 controller, or of v2 (controller "")."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return path.strip("/")
    return None
