"""The directory of a report: each file is whole or absent, and a foreign file is never replaced."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from capd.errors import CapdError
from capd.output_directory import output_directory
from capd.report.document import MARK
from capd.store.disk.files import new_file, rename, unlink

__all__ = ["ReportDirectory", "is_own", "opened"]

_TEMPORARY = ".capd-report-"
# The mark is within this number of bytes in every file.
_HEAD_NBYTES = 512


@contextlib.contextmanager
def opened(path: Path, names: Iterable[str]) -> Iterator[ReportDirectory]:
    """Create the directory if it is missing, and lock it inside the block.

    Raises:
        CapdError: If it has a file of one of these names that no report wrote, or as `output_directory` raises it.
    """
    with output_directory(path, _TEMPORARY):
        directory = ReportDirectory(path)
        directory.refuse_foreign(names)
        yield directory


class ReportDirectory:
    """The directory of a report, made by `opened`. The umask gives the modes of its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: list[str] = []

    def refuse_foreign(self, names: Iterable[str]) -> None:
        """Raise CapdError if one of these files exists and no report wrote it."""
        for name in names:
            if os.path.lexists(self.path / name) and not is_own(self.path / name):
                raise CapdError(
                    f"{self.path / name} is there, and no report wrote it; move it away, or choose another directory"
                )

    def write(self, name: str, payload: bytes) -> None:
        """Write one file, which begins with the mark, in the place of an earlier report's.

        Raises:
            CapdError: If no report wrote the existing file.
            OSError: If the file cannot be written.
        """
        self.refuse_foreign([name])
        temporary = self.path / f"{_TEMPORARY}{name}"
        try:
            new_file(temporary, [payload], 0o666)
            rename(temporary, self.path / name)
        finally:
            unlink(temporary, missing_ok=True)
        self.written.append(name)

    def remove_others(self) -> None:
        """Remove pages that only an earlier report wrote, because they are about other records."""
        for path in self.path.glob("*.png"):
            if path.name not in self.written and is_own(path):
                unlink(path, missing_ok=True)


def is_own(path: Path) -> bool:
    """Return whether a report wrote this file: it is a regular file that begins with the mark."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        # It may be a symbolic link.
        return False
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) and MARK.encode() in os.read(fd, _HEAD_NBYTES)
    finally:
        os.close(fd)
