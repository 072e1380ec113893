"""A directory that one command at a time writes files to.

Files are written under a temporary name first: a file that has its own name is whole. Temporary files that a killed
command left are removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from capd.errors import NO_SPACE, StoreBusy, StoreError, StoreFull
from capd.space import what_is_full

__all__ = ["ExportedFile", "held", "locked_directory", "output_directory", "write_new"]

_EXPORT_TEMPORARY = ".capd-export-"


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file that was written whole. nbytes: its size. records, raw_nbytes: its content."""

    path: Path
    nbytes: int
    records: int
    raw_nbytes: int


@contextlib.contextmanager
def held(directory: Path, busy: str) -> Iterator[None]:
    """Hold the lock of a directory. Raises StoreBusy, with these words, where another process does; OSError."""
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
    """Make the directory (0700) if need be, hold it, and remove files below it whose names begin with `temporary`.

    Raises StoreBusy while another command writes to it, StoreError where it cannot be made, StoreFull, with `when_full`
    after the reason, for what the block raises where nothing more fits.
    """
    busy = f"another export or report writes to {path}; wait for it, or choose another directory"
    with contextlib.ExitStack() as stack:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(held(path, busy))
        except OSError as error:
            if error.errno in NO_SPACE:
                raise StoreFull(f"cannot make {path}: {what_is_full(error, path)}") from error
            raise StoreError(f"cannot write to {path}: {error.strerror}; choose another directory") from error
        for left in path.rglob(f"{temporary}*"):
            if left.is_symlink() or not left.is_dir():
                left.unlink(missing_ok=True)
        try:
            yield
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            raise StoreFull(
                f"cannot write to {path}: {what_is_full(error, path)}; the files that stand are whole{when_full}"
            ) from error


def locked_directory(path: Path) -> contextlib.AbstractContextManager[None]:
    """The directory that an export writes to: `output_directory`."""
    when_full = (
        ". Make room and export again into an empty directory, or choose fewer records (--layer, --tensor, …)"
    )
    return output_directory(path, _EXPORT_TEMPORARY, when_full)


def write_new(path: Path, write: Callable[[BinaryIO], None]) -> int:
    """Write a file (0600) that does not exist yet; returns its size in bytes. Raises FileExistsError, OSError."""
    fd, temporary = tempfile.mkstemp(prefix=_EXPORT_TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            write(file)
            nbytes = file.tell()
        os.link(temporary, path)
    finally:
        os.unlink(temporary)
    return nbytes
