"""Changes of a run's zarr.json: marks such as tags, pins and tombstones, written atomically and durably."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from capd.store.disk.files import new_file, rename, sync_paths, unlink
from capd.store.documents.zarr_json import read_group, run_attributes

__all__ = ["change_attributes", "write_durably"]


def change_attributes(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the `capd` attributes of a run. The time of the document stays, because it orders the runs of a store.

    The caller has excluded other changes: it holds the lock of the store's housekeeping, or the one of the run alone.

    Args:
        run: The directory of the run.
        change: A function that changes the attributes in place.

    Raises:
        NotAStore: The directory is not a run.
        OSError: The document cannot be written. The old one remains.
    """
    run_attributes(run, removed=True)
    document = read_group(run) or {}
    change(document["attributes"]["capd"])
    path = run / "zarr.json"
    found = path.stat()
    write_durably(
        path,
        json.dumps(document).encode(),
        run / ".capd" / "document.tmp",
        times_ns=(found.st_atime_ns, found.st_mtime_ns),
    )


def write_durably(
    path: Path, payload: bytes, temporary: Path, *, times_ns: tuple[int, int] | None = None
) -> None:
    """Replace a file atomically and durably. A file at `temporary` is a leftover of a kill, and is replaced.

    Args:
        path: The file.
        payload: Its new content.
        temporary: A path on the same file system.
        times_ns: The times of access and of modification that the file gets. None: the current ones.

    Raises:
        OSError: The file cannot be written. The old one remains.
    """
    # A link of this name in a run of anybody would lead the write elsewhere.
    unlink(temporary, missing_ok=True)
    new_file(temporary, [payload])
    try:
        if times_ns is not None:
            os.utime(temporary, ns=times_ns)
        sync_paths([temporary], temporary.parent)
        rename(temporary, path)
    except BaseException:
        unlink(temporary, missing_ok=True)
        raise
    sync_paths([path.parent], path.parent)
