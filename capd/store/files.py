"""How files of a store come to be: atomically, with the modes and the syncs that the protocol asks for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from capd.errors import StoreError

__all__ = [
    "copy_range", "make_directory", "new_file", "pwrite_all", "replace_files", "start_writeback", "sync_paths",
    "write_file",
]  # fmt: skip

_GROUP_SYNC_ABOVE = 32  # more files than this are cheaper to sync with one syncfs
_IOV_MAX = 1024
_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None, use_errno=True)


def make_directory(path: Path) -> list[Path]:
    """Create `path` and missing parents with mode 0700; returns the directories that gained an entry."""
    touched: list[Path] = []
    missing: list[Path] = []
    here = path
    while not here.exists():
        missing.append(here)
        here = here.parent
    for directory in reversed(missing):
        directory.mkdir(mode=0o700, exist_ok=True)
        touched.append(directory.parent)
    return touched


def replace_files(payloads: dict[Path, bytes], spool: Path) -> None:
    """Replace many files, each in one step; all are written in `spool` and synced before the first rename."""
    temporaries = {path: spool / f"document-{number}.tmp" for number, path in enumerate(payloads)}
    try:
        for path, payload in payloads.items():
            write_file(temporaries[path], payload)
        sync_paths(temporaries.values(), spool)
        for path, temporary in temporaries.items():
            os.replace(temporary, path)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def new_file(path: Path, parts: Sequence[bytes], *, sync: bool) -> int:
    """Create a file, mode 0600, with these first bytes; returns its size. Nothing is left if it fails."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        end = pwrite_all(fd, parts, 0)
        if sync:
            os.fsync(fd)
            sync_paths([path.parent], path.parent)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return end


def write_file(path: Path, payload: bytes) -> None:
    """Write a file in place, mode 0600, without a sync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        pwrite_all(fd, [payload], 0)
    finally:
        os.close(fd)


def pwrite_all(fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
    """Write all parts as one contiguous run at `offset`; returns the offset behind it. Raises OSError."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    while views:
        written = os.pwritev(fd, views[:_IOV_MAX], offset)
        offset += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
    return offset


def copy_range(source: int, target: int, nbytes: int) -> None:
    """Copy the first `nbytes` of one file to another, in the kernel where the file system allows it."""
    done = 0
    while done < nbytes:
        try:
            count = os.copy_file_range(source, target, nbytes - done, done, done)
        except OSError:  # EXDEV, EINVAL, ENOSYS: not on this file system
            chunk = os.pread(source, min(8 << 20, nbytes - done), done)
            count = os.pwrite(target, chunk, done) if chunk else 0
        if count == 0:
            raise StoreError(f"source ends after {done} of {nbytes} bytes while a shard is copied")
        done += count


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Ask the kernel to start writing a range to disk; does not wait, and failing is harmless."""
    _libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)


def sync_paths(paths: Iterable[Path], root: Path) -> None:
    """Make files and directories durable: one by one when few, else with one syncfs on the root's file system."""
    todo = sorted(set(paths))
    if len(todo) > _GROUP_SYNC_ABOVE:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _libc.syncfs(fd) != 0:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error), str(root))
        finally:
            os.close(fd)
        return
    for path in todo:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
