"""Messages about full disks: which file system is full, and which of its limits: bytes, inodes or a quota."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from capd.errors import NO_SPACE, StoreFull

__all__ = ["full_database", "if_full", "mount_of", "shown_size", "what_is_full"]

# The inodes that a new series may need.
_FEW_INODES = 16


def shown_size(nbytes: int) -> str:
    """Return bytes in the units of the settings: 999 B, 25.2 MB, 1.50 GB."""
    if nbytes < 10**5:
        return f"{nbytes:,} B"
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**9 else f"{nbytes / 1e6:.1f} MB"


def mount_of(path: Path) -> Path:
    """Return the mount point of the file system of `path`, which need not exist."""
    place = Path(os.path.realpath(path))
    while not os.path.ismount(place):
        place = place.parent
    return place


def what_is_full(error: OSError, place: Path) -> str:
    """Return a sentence for an error of NO_SPACE at `place`: the full resource and the remedy."""
    if isinstance(error.filename, str) and os.path.isabs(error.filename):
        place = Path(error.filename)
    mount = mount_of(place)
    if error.errno == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        how = "" if limit == resource.RLIM_INFINITY else f" (`ulimit -f`: {shown_size(limit)})"
        return f"a file at {place} may not grow any more{how}; raise the limit, or use another file system than {mount}"
    try:
        found = os.statvfs(mount)
    except OSError:
        return f"the file system {mount} has no room for {place} ({error.strerror}); make room there"
    free = f"{shown_size(found.f_bavail * found.f_frsize)} of {shown_size(found.f_blocks * found.f_frsize)}"
    if error.errno == errno.EDQUOT:
        return (
            f"the quota of user {os.geteuid()} on the file system {mount} is used up at {place} "
            f"({free} are free on it); delete files there, or have the quota raised"
        )
    if found.f_files and found.f_favail < _FEW_INODES:
        return (
            f"the file system {mount} has no inodes left for {place} "
            f"({found.f_favail:,} of {found.f_files:,} are free, and {free}); delete files there"
        )
    return f"the file system {mount} has no room left for {place} ({free} are free); make room there"


def if_full(error: Exception, place: Path) -> Exception:
    """Return a StoreFull with the full resource at `place` for an error of NO_SPACE; any other error unchanged."""
    if not (isinstance(error, OSError) and error.errno in NO_SPACE):
        return error
    full = StoreFull(what_is_full(error, place))
    full.__cause__ = error
    return full


def full_database(path: Path) -> str:
    """Return the sentence of `what_is_full` for SQLite's report of a full database or disk."""
    return what_is_full(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), path)
