"""Says what has no room left: which file system, how full it is, and what refused: its bytes, its inodes, a quota."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from capd.errors import NO_SPACE, StoreFull

__all__ = ["full_database", "if_full", "mount_of", "shown_size", "what_is_full"]

_FEW_INODES = 16  # what a new series may take


def shown_size(nbytes: int) -> str:
    """Bytes in the units in which limits are set: 999 B, 25.2 MB, 1.50 GB."""
    if nbytes < 10**5:
        return f"{nbytes:,} B"
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**9 else f"{nbytes / 1e6:.1f} MB"


def mount_of(path: Path) -> Path:
    """Where the file system is mounted that holds `path`, or would hold it."""
    place = Path(os.path.realpath(path))
    while not os.path.ismount(place):
        place = place.parent
    return place


def what_is_full(error: OSError, place: Path) -> str:
    """In words why nothing more fits at `place`, for an error of NO_SPACE, and what to do."""
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
    """A StoreFull that says what is full at `place`, for an error of NO_SPACE; any other error as it is."""
    if not (isinstance(error, OSError) and error.errno in NO_SPACE):
        return error
    full = StoreFull(what_is_full(error, place))
    full.__cause__ = error
    return full


def full_database(path: Path) -> str:
    """What is full when SQLite says that the database or the disk is."""
    return what_is_full(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), path)
