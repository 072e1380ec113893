"""Single files at a path of the user's choice, whole or absent. An existing file is replaced only on request."""

from __future__ import annotations

import os
from pathlib import Path

from capd.errors import NO_SPACE, CapdError, StoreFull
from capd.space import what_is_full
from capd.store.disk.files import link, new_file, rename, unlink

__all__ = ["write_single"]


def write_single(path: Path, payload: bytes, *, replace: bool) -> None:
    """Write a file, mode 0666 less the umask.

    With `replace` an existing file is replaced. It stays unchanged if this fails.

    Raises:
        CapdError: If the name is taken or the file cannot be created.
        StoreFull: If the file does not fit on the disk.
    """
    temporary = path.with_name(f".capd-{os.getpid()}-{path.name}")
    try:
        new_file(temporary, [payload], 0o666)
        if replace:
            rename(temporary, path)
        else:
            link(temporary, path)
    except FileExistsError:
        raise CapdError(f"{path} exists already; choose another name, or replace it with --force") from None
    except OSError as error:
        if error.errno in NO_SPACE:
            raise StoreFull(
                f"cannot write {path}: {what_is_full(error, path)}, or choose another place"
            ) from error
        raise CapdError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    finally:
        unlink(temporary, missing_ok=True)
