"""The host memory that an arena may take, by MemAvailable and the headroom of cgroups, versions 1 and 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Optional

from capd_client.process.log import RateLimitedLog

__all__ = [
    "MAX_ARENA_NBYTES",
    "MIN_ARENA_NBYTES",
    "arena_nbytes",
    "available_nbytes",
    "default_arena_nbytes",
    "most_arena_nbytes",
]

MAX_ARENA_NBYTES = 2 << 30
MIN_ARENA_NBYTES = 1 << 20
# The part of the available memory for all ranks of this node together, by default.
SHARE = 0.2
# The same if a size is requested. All of the arena may come into use, and this must not end the job.
MOST_SHARE = 0.5


def arena_nbytes(asked: Optional[int], local_world_size: int, notices: RateLimitedLog) -> int:
    """Return the requested size, limited by the available memory; for None, a size by the available memory."""
    if asked is None:
        return default_arena_nbytes(local_world_size)
    most = most_arena_nbytes(local_world_size)
    if asked > most:
        notices.warn(
            "arena_bytes",
            "an arena of %d bytes does not fit: %d ranks share half of the available memory, the arena has %d bytes. "
            "Give the job more memory, or lower CAPD_ARENA_BYTES",
            asked,
            local_world_size,
            most,
        )
    return min(asked, most)


def default_arena_nbytes(local_world_size: int, available: Optional[int] = None) -> int:
    """Return the arena size of one rank: 20 % of the available memory over the node's ranks, 1 MiB … 2 GiB."""
    return min(MAX_ARENA_NBYTES, _share(SHARE, local_world_size, available))


def most_arena_nbytes(local_world_size: int, available: Optional[int] = None) -> int:
    """Return the largest arena of one rank on request: half of the available memory over the node's ranks."""
    return _share(MOST_SHARE, local_world_size, available)


def _share(share: float, local_world_size: int, available: Optional[int]) -> int:
    nbytes = available_nbytes() if available is None else available
    return max(MIN_ARENA_NBYTES, int(nbytes * share) // max(1, local_world_size))


def available_nbytes(root: str = "/") -> int:
    """Return the smaller of MemAvailable and the headroom of every cgroup above this process, in bytes."""
    limits = [limit for limit in (_mem_available(root), *_cgroup_headrooms(root)) if limit is not None]
    return max(0, min(limits)) if limits else MIN_ARENA_NBYTES


def _mem_available(root: str) -> Optional[int]:
    for line in _lines(os.path.join(root, "proc/meminfo")):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _cgroup_headrooms(root: str) -> Iterator[Optional[int]]:
    base = os.path.join(root, "sys/fs/cgroup")
    for line in _lines(os.path.join(root, "proc/self/cgroup")):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from _walk(base, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _walk(
                os.path.join(base, "memory"),
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )


def _walk(base: str, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[Optional[int]]:
    """Yield the headroom at every level. In a container the path may be the host's, and then only the top exists."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        folder = os.path.join(base, *parts[:depth])
        yield _headroom(folder, limit, usage, reclaimable)


def _headroom(folder: str, limit: str, usage: str, reclaimable: str) -> Optional[int]:
    most = _number(os.path.join(folder, limit))
    used = _number(os.path.join(folder, usage))
    if most is None or used is None:
        return None
    for line in _lines(os.path.join(folder, "memory.stat")):
        name, _, value = line.partition(" ")
        if name == reclaimable and value.strip().isdigit():
            # The kernel drops this page cache before it refuses memory.
            used -= int(value)
    return most - used


def _number(path: str) -> Optional[int]:
    for line in _lines(path):
        # "max" is no limit.
        return int(line) if line.strip().isdigit() else None
    return None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
