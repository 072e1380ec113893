"""The page as a single file: over nothing that no report wrote unless that was asked for."""

from __future__ import annotations

import os
from pathlib import Path

from capd.errors import CapdError
from capd.report.directory import is_own
from capd.report.image_files import write_single

__all__ = ["refuse_foreign_file", "write_page_file"]


def refuse_foreign_file(path: Path, *, force: bool) -> None:
    """Raises CapdError where a file is there that no report wrote, a link too, but for `force`; or a directory is."""
    if path.is_dir():
        raise CapdError(f"{path} is a directory, not a page; choose another name")
    if not force and os.path.lexists(path) and not is_own(path):
        raise CapdError(
            f"{path} is there, and no report wrote it; choose another name, or replace it with --force"
        )


def write_page_file(path: Path, payload: bytes, *, force: bool) -> None:
    """Writes the file in the place of an earlier report's; with `force`, of anything that is no directory.

    Raises CapdError for what `refuse_foreign_file` refuses, and what `write_single` raises.
    """
    refuse_foreign_file(path, force=force)
    write_single(path, payload, replace=True)
