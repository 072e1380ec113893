"""Single files where the user wants them: whole or absent, and over nothing unless that was asked for."""

from __future__ import annotations

import os
from pathlib import Path

from capd.errors import NO_SPACE, CapdError, StoreFull
from capd.space import what_is_full
from capd.store.disk.files import link, new_file, rename, unlink

__all__ = ["write_single"]


def write_single(path: Path, payload: bytes, *, replace: bool) -> None:
    """Writes a file, mode 0600. replace: in the place of what is there, which stands as it was if this fails.

    Raises CapdError where the name is taken or the file cannot be made, StoreFull where it does not fit.
    """
    temporary = path.with_name(f".capd-{os.getpid()}-{path.name}")
    try:
        new_file(temporary, [payload])
        if replace:
            rename(temporary, path)
        else:
            link(temporary, path)
    except FileExistsError:
        raise CapdError(f"{path} is there; choose another name, or replace it with --force") from None
    except OSError as error:
        if error.errno in NO_SPACE:
            raise StoreFull(
                f"cannot write {path}: {what_is_full(error, path)}, or choose another place"
            ) from error
        raise CapdError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    finally:
        unlink(temporary, missing_ok=True)
