"""The place of the recorder's spool: whether a node has the memory and the disk that the settings ask for."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from capd.errors import ConfigError
from capd.space import mount_of, shown_size
from capd.store.keeps.held_files import SHARED_MEMORY
from capd.window.settings import WindowSettings
from capd_client.config.sizes import amount_nbytes

__all__ = ["check_place", "memory_limit", "place_problem"]


def memory_limit(settings: WindowSettings) -> int:
    """Return the bytes that may be held in /dev/shm now; 0 if there is none."""
    node = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return settings.memory_within(node, found.f_bavail * found.f_frsize)


def check_place(settings: WindowSettings, root: Path, keep_free: int | float) -> None:
    """Raise ConfigError if the node lacks the memory or the disk for the settings; see `place_problem`."""
    if problem := place_problem(settings, root, keep_free):
        raise ConfigError(problem)


def place_problem(settings: WindowSettings, root: Path, keep_free: int | float) -> str:
    """Return what the place of the spool lacks, in one line with the key and the remedy; "" if nothing.

    Args:
        settings: The settings of the recorder.
        root: The directory of the runs, which need not exist.
        keep_free: The bytes, or the share of the file system, that stay free.
    """
    return _memory_problem(settings) or _disk_problem(settings, root, keep_free)


def _memory_problem(settings: WindowSettings) -> str:
    asked = settings.memory_nbytes
    if not asked:
        return ""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return f"[window] memory: {SHARED_MEMORY} cannot be used ({error.strerror}); write memory = 0"
    total = found.f_blocks * found.f_frsize
    if asked <= total:
        return ""
    return (
        f"[window] memory: {shown_size(asked)} are more than the {shown_size(total)} of {SHARED_MEMORY}; lower it, or "
        "enlarge /dev/shm"
    )


def _disk_problem(settings: WindowSettings, root: Path, keep_free: int | float) -> str:
    place = _existing(settings.directory or root)
    if settings.directory is not None and (problem := _unwritable(settings.directory, place)):
        return problem
    needed = settings.nbytes - min(settings.nbytes, settings.memory_nbytes or 0)
    try:
        found = os.statvfs(place)
    except OSError as error:
        return f"[window] directory: {place} cannot be looked at ({error.strerror}); choose another one"
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    mount = mount_of(place)
    if needed > total:
        return (
            f"[window] bytes: {shown_size(needed)} on disk are more than the {shown_size(total)} of the file system "
            f"{mount}; lower bytes, or name another directory"
        )
    room = free - amount_nbytes(keep_free, total)
    if not needed or needed <= room + _held_nbytes(settings, root):
        return ""
    return (
        f"[window] bytes: {shown_size(needed)} on disk are more than the {shown_size(max(0, room))} that the file "
        f"system {mount} has beside keep_free; lower bytes, make room there, or name another directory"
    )


def _unwritable(directory: Path, place: Path) -> str:
    """Return why no file can be made in the directory, or it not be made; "" if it can."""
    if not place.is_dir():
        return f"[window] directory: {place} is no directory; choose another one"
    try:
        # Only the attempt knows of read-only mounts, access lists and network file systems.
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return (
            f"[window] directory: {directory} cannot be written to ({error.strerror}); make {place} writable for "
            f"user {os.geteuid()}, or choose another one"
        )


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _held_nbytes(settings: WindowSettings, root: Path) -> int:
    """Return the bytes of a spool that an earlier daemon left. They are part of `bytes`, and are not free."""
    # The directory may have much else, which makes no room.
    if settings.directory is not None:
        files = settings.directory.glob("window-*/*/*.held")
    else:
        files = root.glob("*.zarr/.capd/node=*/window/*.held")
    total = 0
    for file in files:
        try:
            found = file.lstat()
        except OSError:
            continue
        total += found.st_blocks * 512
    return total
