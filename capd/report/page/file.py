"""The page as a single file. It never replaces a foreign file, unless that is requested."""

from __future__ import annotations

import os
from pathlib import Path

from capd.errors import CapdError
from capd.report.directory import is_own
from capd.report.image_files import write_single

__all__ = ["refuse_foreign_file", "write_page_file"]


def refuse_foreign_file(path: Path, *, force: bool) -> None:
    """Refuse a path that is taken by a directory, or by a foreign file or link unless `force` is set.

    Raises:
        CapdError: If the path is taken.
    """
    if path.is_dir():
        raise CapdError(f"{path} is a directory, not a page; choose another name")
    if not force and os.path.lexists(path) and not is_own(path):
        raise CapdError(
            f"{path} is there, and no report wrote it; choose another name, or replace it with --force"
        )


def write_page_file(path: Path, payload: bytes, *, force: bool) -> None:
    """Write the file, in the place of an earlier report's. With `force`, replace anything but a directory.

    Raises:
        CapdError: If the path is taken, or the file cannot be written (see `write_single`).
    """
    refuse_foreign_file(path, force=force)
    write_single(path, payload, replace=True)
