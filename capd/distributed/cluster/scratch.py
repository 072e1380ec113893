"""The temporary directory of an own cluster. What killed commands left of theirs is removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from capd.errors import StoreBusy
from capd.output_directory import directory_lock

__all__ = ["scratch_directory"]

# A directory is locked long before.
_YOUNG_S = 60.0


@contextlib.contextmanager
def scratch_directory() -> Iterator[str]:
    """Hold a temporary directory, and remove those of this machine that nobody holds."""
    # Locks of another machine may not be seen here.
    prefix = f"capd-dask-{os.uname().nodename}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_left(left)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as place,
        directory_lock(Path(place), f"another command uses {place}"),
    ):
        yield place


def _remove_left(place: Path) -> None:
    with contextlib.suppress(OSError, StoreBusy):
        found = place.lstat()
        if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _YOUNG_S:
            with directory_lock(place, "in use"):
                shutil.rmtree(place, ignore_errors=True)
