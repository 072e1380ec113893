"""All changes of a store's files: atomic, with the modes and the syncs that the protocol requires.

The store's other modules open and read files themselves. They create, write, sync, rename and delete only through this
module. Tests can therefore substitute a file system with faults.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from capd.errors import StoreError
from capd.store.disk.failpoints import failpoint

__all__ = [
    "GROUP_SYNC_ABOVE", "FileSystemSyncFailed", "copy_range", "link", "make_directory", "new_file",
    "opened", "pwrite_all", "remove_tree", "rename", "replace_files", "start_writeback", "sync_data", "sync_paths",
    "truncate", "unlink", "write_file",
]  # fmt: skip

# For more files than this, one syncfs is cheaper.
GROUP_SYNC_ABOVE = 32
_IOV_MAX = 1024
_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None, use_errno=True)
# Before Linux 5.8 syncfs does not report the errors of the files it writes.
_syncfs_reports = tuple(int(part) for part in os.uname().release.split(".")[:2] if part.isdigit()) >= (5, 8)


class FileSystemSyncFailed(OSError):
    """A syncfs failed: any file of the file system may have lost its unsynced data."""


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> Iterator[int]:
    """Open a file for some statements and yield its descriptor. A new file has `mode`, less the umask."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def make_directory(path: Path) -> list[Path]:
    """Create `path` and its missing parents with mode 0700. Return the directories that gained an entry."""
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
    """Replace many files, each of them atomically.

    All files are written in `spool` and synced before the first rename. Nothing is synced after the renames.
    """
    temporaries = {path: spool / f"document-{number}.tmp" for number, path in enumerate(payloads)}
    try:
        for path, payload in payloads.items():
            write_file(temporaries[path], payload)
        sync_paths(temporaries.values(), spool)
        failpoint("replace.after_sync")
        for path, temporary in temporaries.items():
            rename(temporary, path)
            failpoint("replace.after_first")
    except BaseException:
        for temporary in temporaries.values():
            with contextlib.suppress(OSError):
                unlink(temporary, missing_ok=True)
        raise


def new_file(path: Path, parts: Sequence[bytes], mode: int = 0o600) -> int:
    """Create a file with these first bytes. Return its size. After a failure no file remains.

    `mode`, less the umask, is its mode. Files of a store have the default, files to be shown to others 0666.
    """
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as fd:
        try:
            return pwrite_all(fd, parts, 0)
        except BaseException:
            unlink(path, missing_ok=True)
            raise


def write_file(path: Path, payload: bytes) -> None:
    """Write a file in place, mode 0600, without a sync."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
        pwrite_all(fd, [payload], 0)


def pwrite_all(fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
    """Write all parts contiguously at `offset`. Return the offset after them. Raises OSError."""
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
    """Copy the first `nbytes` of one file to another, in the kernel if the file system allows it.

    Raises:
        StoreError: The source is shorter.
    """
    done = 0
    while done < nbytes:
        try:
            count = os.copy_file_range(source, target, nbytes - done, done, done)
        except OSError:
            # EXDEV, EINVAL, ENOSYS: this file system does not support it.
            chunk = os.pread(source, min(8 << 20, nbytes - done), done)
            count = os.pwrite(target, chunk, done) if chunk else 0
        if count == 0:
            raise StoreError(f"the source ends after {done} of {nbytes} bytes while a shard is copied")
        done += count


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Ask the kernel to start writing a range to disk. It does not wait, and a failure is harmless."""
    _libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)


def rename(source: Path, target: Path) -> None:
    """Rename `source` to `target`, replacing an existing file."""
    os.replace(source, target)


def link(source: Path, target: Path) -> None:
    """Give `source` the additional name `target`.

    Raises:
        FileExistsError: The name is taken.
    """
    os.link(source, target)


def unlink(path: Path, *, missing_ok: bool = False) -> None:
    """Delete a file."""
    path.unlink(missing_ok=missing_ok)


def remove_tree(path: Path) -> None:
    """Delete a directory with its content. Files that cannot be deleted remain."""
    shutil.rmtree(path, ignore_errors=True)


def truncate(file: int | Path, nbytes: int) -> None:
    """Truncate a file to `nbytes`."""
    os.truncate(file, nbytes)


def sync_data(fd: int) -> None:
    """Make a file's content durable. After an error the file must not be trusted any more."""
    os.fdatasync(fd)


def sync_paths(paths: Iterable[Path], root: Path) -> None:
    """Make files and directories durable: one by one if they are few, else with one syncfs on the root's file system.

    After an error none of the files may be trusted, because the kernel marks the lost pages as clean.
    """
    todo = set(paths)
    if len(todo) > GROUP_SYNC_ABOVE and _syncfs_reports:
        _sync_file_system(root)
        return
    for path in todo:
        with opened(path) as fd:
            os.fsync(fd)


def _sync_file_system(root: Path) -> None:
    with opened(root, os.O_DIRECTORY) as fd:
        if _libc.syncfs(fd) != 0:
            error = ctypes.get_errno()
            raise FileSystemSyncFailed(error, os.strerror(error), str(root))
