"""What takes space in a store root and nobody needs: the trash, quarantines, temporary files of kills."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from capd.errors import CapdError, StoreError
from capd.lifecycle.checks import check_place
from capd.lifecycle.inventory import run_paths
from capd.lifecycle.trash import KEEP_S, TrashEntry, entries, finish, free
from capd.lifecycle.usage import spare_files
from capd.store.disk.files import remove_tree, unlink
from capd.store.disk.run_lock import RunLock, is_written

__all__ = ["Spare", "free_spare", "spare_in"]


@dataclass(frozen=True, slots=True)
class Spare:
    """Something that `capd gc` frees.

    Attributes:
        what: "removed run", "removed series", "quarantine" or "leftover".
        run: The name of the run that it is of.
        place: Its path.
        nbytes: Its bytes on disk.
        since_s: Since when it is there, as seconds since 1970.
        due_s: From when on it is freed.
        is_due: Whether it is freed now.
        entry: The entry of the trash; None for a part of a run.
    """

    what: str
    run: str
    place: Path
    nbytes: int
    since_s: float
    due_s: float
    is_due: bool
    entry: TrashEntry | None = None


def spare_in(root: Path, *, everything: bool = False) -> list[Spare]:
    """Return what can be freed in a store root. everything: whether all of the trash is due."""
    now_s = time.time()
    found = [
        Spare(
            "removed run" if entry.is_run else "removed series",
            entry.name.removesuffix(".zarr") or "-",
            entry.place,
            entry.nbytes,
            entry.removed_s,
            entry.removed_s + KEEP_S,
            everything or entry.is_due(now_s),
            entry,
        )
        for entry in entries(root)
    ]
    for run in run_paths(root):
        if is_written(run):
            continue
        try:
            check_place(run)
            spare = [(place, nbytes, place.lstat().st_mtime) for place, nbytes in spare_files(run)]
        except (CapdError, OSError):
            continue
        for place, nbytes, since_s in spare:
            what = "quarantine" if place.name == "quarantine" else "leftover"
            found.append(Spare(what, run.stem, place, nbytes, since_s, since_s, is_due=True))
    return found


def free_spare(root: Path, found: Sequence[Spare], failed: Callable[[Path, Exception], None]) -> int:
    """Free what is due. Return the freed bytes. The caller holds the lock of the store's housekeeping.

    Args:
        root: The store root.
        found: What there is.
        failed: Is told of each part that could not be freed. The others go on.
    """
    freed = 0
    for one in found:
        if not one.is_due:
            continue
        try:
            if one.entry is not None:
                freed += free(one.entry)
                continue
            run = root / f"{one.run}.zarr"
            with RunLock.alone(run):
                if one.place.is_dir() and not one.place.is_symlink():
                    remove_tree(one.place)
                else:
                    unlink(one.place, missing_ok=True)
            if one.place.exists():
                raise StoreError("it cannot be deleted; check its permissions")
            freed += one.nbytes
        except (CapdError, OSError) as error:
            failed(one.place, error)
    # Last, because it needs some space itself.
    finish(root, failed)
    return freed
