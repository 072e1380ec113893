"""The output directory of a command: only one command at a time writes files to it.

Its files are made for others, so the umask alone says who may read them. Files are written under a temporary name
first, so a file under its own name is complete. The next command removes the temporary files of a killed one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from capd.errors import NO_SPACE, CapdError, StoreBusy, StoreError, StoreFull
from capd.space import what_is_full

__all__ = [
    "ExportedFile", "directory_lock", "locked_directory", "output_directory", "remove_export_temporaries", "write_new",
]  # fmt: skip

_EXPORT_TEMPORARY = ".capd-export-"


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A complete exported file. nbytes: its size. records, raw_nbytes: its content."""

    path: Path
    nbytes: int
    records: int
    raw_nbytes: int


@contextlib.contextmanager
def directory_lock(directory: Path, busy: str) -> Iterator[None]:
    """Hold the lock of a directory. `busy` is the message of the StoreBusy.

    Raises:
        StoreBusy: Another process holds the lock.
        OSError: The directory cannot be opened.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreBusy(busy) from None
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def output_directory(path: Path, temporary: str, when_full: str = "") -> Iterator[None]:
    """Create the directory if it is missing, hold its lock, and remove its temporary files.

    Args:
        path: The directory.
        temporary: The first characters of all temporary names.
        when_full: The remedy that the message of StoreFull ends with.

    Raises:
        StoreBusy: Another command writes to the directory.
        StoreError: The directory cannot be created.
        StoreFull: The disk is full, here or in the block.
    """
    busy = f"another export or report writes to {path}; wait for it, or choose another directory"
    with contextlib.ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(directory_lock(path, busy))
        except OSError as error:
            if error.errno in NO_SPACE:
                raise StoreFull(f"cannot create {path}: {what_is_full(error, path)}") from error
            raise StoreError(f"cannot write to {path}: {error.strerror}; choose another directory") from error
        _remove_temporaries(path, temporary)
        try:
            yield
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            raise StoreFull(
                f"cannot write to {path}: {what_is_full(error, path)}; the files in it are complete{when_full}"
            ) from error


def _remove_temporaries(path: Path, temporary: str) -> None:
    for left in path.rglob(f"{temporary}*"):
        if left.is_symlink() or not left.is_dir():
            left.unlink(missing_ok=True)


def remove_export_temporaries(path: Path) -> None:
    """Remove the temporary files that killed workers of an export left. The caller holds the lock."""
    _remove_temporaries(path, _EXPORT_TEMPORARY)


def locked_directory(path: Path) -> contextlib.AbstractContextManager[None]:
    """Hold the output directory of an export, as `output_directory` does."""
    when_full = (
        ". Make room and export again into an empty directory, or choose fewer records (--layer, --tensor, …)"
    )
    return output_directory(path, _EXPORT_TEMPORARY, when_full)


def write_new(path: Path, write: Callable[[BinaryIO], None]) -> int:
    """Write a new file, mode 0666 less the umask, and return its size in bytes.

    Raises:
        CapdError: The file exists.
        OSError: The file cannot be written.
    """
    temporary = path.with_name(f"{_EXPORT_TEMPORARY}{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "wb") as file:
            write(file)
            nbytes = file.tell()
        os.link(temporary, path)
    except FileExistsError:
        raise CapdError(f"{path} exists already; export into another directory") from None
    finally:
        os.unlink(temporary)
    return nbytes
