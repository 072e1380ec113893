"""The place of removed things: `<root>/.capd/trash/<time>-<n>/`, on the file system of the runs."""

from __future__ import annotations

from pathlib import Path

from capd.errors import StoreError
from capd.store.disk.files import make_directory, sync_paths
from capd.store.documents.tombstone import Tombstone

__all__ = ["DELETING", "check_trash", "new_entry", "trash_of"]

# The suffix of an entry whose content is being deleted.
DELETING = ".deleting"
_MAX_ENTRIES = 100_000


def trash_of(root: Path) -> Path:
    """Return the trash of a store root."""
    return root / ".capd" / "trash"


def _free_name(trash: Path) -> str:
    stamp = Tombstone.now("").at.replace("-", "").replace(":", "")
    for number in range(1, _MAX_ENTRIES):
        name = f"{stamp}-{number}"
        if not (trash / name).exists() and not (trash / f"{name}{DELETING}").exists():
            return name
    raise OSError(f"{trash} has {_MAX_ENTRIES} entries of one second")


def check_trash(root: Path) -> None:
    """Check that runs of a store root can be renamed into its trash.

    Raises:
        StoreError: The trash is a symbolic link, no directory, or on another file system.
    """
    for place in (root / ".capd", trash_of(root)):
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            raise StoreError(f"{place} is not a directory itself, nothing removed; move it away")
        if place.is_dir() and place.stat().st_dev != root.stat().st_dev:
            raise StoreError(f"{place} is on another file system than the runs, nothing removed; unmount it")


def new_entry(root: Path) -> Path:
    """Return a new, empty directory of the trash, whose name begins with the present time. Raises OSError."""
    trash = trash_of(root)
    touched = make_directory(trash)
    while True:
        entry = trash / _free_name(trash)
        try:
            # Daemons make entries without the lock of the housekeeping.
            entry.mkdir(mode=0o700)
        except FileExistsError:
            continue
        sync_paths([*touched, trash], root)
        return entry
