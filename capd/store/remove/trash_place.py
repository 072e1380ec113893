"""The place of removed things: `<root>/.capd/trash/<time>-<n>/`, on the file system of the runs."""

from __future__ import annotations

from pathlib import Path

from capd.store.disk.files import make_directory, sync_paths
from capd.store.documents.tombstone import Tombstone

__all__ = ["DELETING", "entry_name", "new_entry", "trash_of"]

# The suffix of an entry whose content is being deleted.
DELETING = ".deleting"
_MAX_ENTRIES = 100_000


def trash_of(root: Path) -> Path:
    """Return the trash of a store root."""
    return root / ".capd" / "trash"


def entry_name(root: Path, mark: Tombstone) -> str:
    """Return a free name for an entry of the trash, which begins with the time of its removal."""
    trash, stamp = trash_of(root), mark.at.replace("-", "").replace(":", "")
    for number in range(1, _MAX_ENTRIES):
        name = f"{stamp}-{number}"
        if not (trash / name).exists() and not (trash / f"{name}{DELETING}").exists():
            return name
    raise OSError(f"{trash} has {_MAX_ENTRIES} entries of one second")


def new_entry(root: Path, name: str) -> Path:
    """Return the directory of an entry, which is created if it is missing. Raises OSError."""
    entry = trash_of(root) / name
    sync_paths(make_directory(entry), root)
    return entry
