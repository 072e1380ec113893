"""The lock of a store root's housekeeping: one command at a time tags, removes or frees there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from capd.errors import NotAStore, StoreBusy, StoreError
from capd.store.disk.files import make_directory

__all__ = ["housekeeping"]

_PATIENCE_S = 10.0
_RETRY_S = 0.05


@contextlib.contextmanager
def housekeeping(root: Path) -> Iterator[None]:
    """Hold the lock of a store root.

    Raises:
        NotAStore: The directory does not exist.
        StoreBusy: Another command held the lock for _PATIENCE_S.
        StoreError: The lock cannot be taken.
    """
    if not root.is_dir():
        raise NotAStore(f"{root} is no directory; name a directory of runs")
    until = time.monotonic() + _PATIENCE_S
    try:
        make_directory(root / ".capd")
        path = root / ".capd" / "lifecycle.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StoreError(
            f"cannot change the runs in {root}: {error.strerror or error}; this user must be able to write {root}/.capd"
        ) from error
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise StoreBusy(
                        f"another command of capd removes or tags runs in {root}; try again when it is done"
                    ) from None
                time.sleep(_RETRY_S)
            except OSError as error:
                raise StoreError(f"cannot lock {path}: {error.strerror or error}") from error
        yield
    finally:
        os.close(fd)
