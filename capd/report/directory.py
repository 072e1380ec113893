"""The directory that a report is written to: each file whole or absent, and none replaced that no report wrote."""

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
_HEAD_NBYTES = 512  # every file has the mark within it


@contextlib.contextmanager
def opened(path: Path, names: Iterable[str]) -> Iterator[ReportDirectory]:
    """Make the directory (0700) if need be, and hold it alone.

    Raises CapdError where a file of one of these names is there that no report wrote, and what `output_directory` does.
    """
    with output_directory(path, _TEMPORARY):
        directory = ReportDirectory(path)
        directory.refuse_foreign(names)
        yield directory


class ReportDirectory:
    """Use `opened`. Files are 0600."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: list[str] = []

    def refuse_foreign(self, names: Iterable[str]) -> None:
        """Raises CapdError where one of these files is there and no report wrote it."""
        for name in names:
            if os.path.lexists(self.path / name) and not is_own(self.path / name):
                raise CapdError(
                    f"{self.path / name} is there, and no report wrote it; move it away, or choose another directory"
                )

    def write(self, name: str, payload: bytes) -> None:
        """Write one file, which begins with the mark, in the place of an earlier report's.

        Raises OSError, CapdError where the earlier one is no report's.
        """
        self.refuse_foreign([name])
        temporary = self.path / f"{_TEMPORARY}{name}"
        try:
            new_file(temporary, [payload])
            rename(temporary, self.path / name)
        finally:
            unlink(temporary, missing_ok=True)
        self.written.append(name)

    def remove_others(self) -> None:
        """Remove pages that an earlier report wrote and this one did not: they are of other records."""
        for path in self.path.glob("*.png"):
            if path.name not in self.written and is_own(path):
                unlink(path, missing_ok=True)


def is_own(path: Path) -> bool:
    """Whether a report wrote this file: a regular one that begins with the mark."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # a symbolic link, say
        return False
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) and MARK.encode() in os.read(fd, _HEAD_NBYTES)
    finally:
        os.close(fd)
