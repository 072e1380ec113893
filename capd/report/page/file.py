"""The page as a single file: whole or absent, and over nothing that no report wrote unless that was asked for."""

from __future__ import annotations

import os
from pathlib import Path

from capd.errors import NO_SPACE, CapdError, StoreFull
from capd.report.directory import is_own
from capd.space import what_is_full
from capd.store.files import new_file, rename, unlink

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
    """Write the file, mode 0600, in the place of an earlier report's; with `force`, of anything that is no directory.

    Raises CapdError for what `refuse_foreign_file` refuses and where it cannot be made, StoreFull where it does not
    fit; an earlier file then stands as it was.
    """
    refuse_foreign_file(path, force=force)
    temporary = path.with_name(f".capd-report-{os.getpid()}-{path.name}")
    try:
        new_file(temporary, [payload])
        rename(temporary, path)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise StoreFull(
                f"cannot write {path}: {what_is_full(error, path)}, or choose another place"
            ) from error
        raise CapdError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    finally:
        unlink(temporary, missing_ok=True)
