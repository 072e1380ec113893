"""The removal of whole runs into the trash, the way back, and the end of what lies there too long.

Remove: tombstone in the run's document → note beside the runs → rename into the trash. A run with a tombstone at its
old place was left by a kill: `finish` moves it. Free: the entry gets a name that marks it, then it is deleted. A marked
entry is only freed further. Every step can be repeated.

The callers hold the lock of the store's housekeeping, but for `settle`, which a daemon calls that opens a run.
"""

from __future__ import annotations

import calendar
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from capd.errors import NO_SPACE, CapdError, NotAStore, StoreBusy, StoreError, StoreFull
from capd.lifecycle.checks import check_held, check_place
from capd.lifecycle.inventory import RunFacts, run_paths
from capd.lifecycle.usage import walked
from capd.store.catalog.place import CatalogPlace
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import make_directory, remove_tree, rename, sync_paths, unlink
from capd.store.disk.layout import node_directory, nodes_of
from capd.store.disk.run_document import change_attributes, write_durably
from capd.store.disk.run_lock import RunLock
from capd.store.documents.tombstone import Tombstone, note_path, note_payload, tombstone_in
from capd.store.documents.zarr_json import run_attributes
from capd.store.keeps.held_files import discard_held
from capd.store.remove.trash_place import DELETING, check_trash, new_entry, trash_of

__all__ = [
    "KEEP_S",
    "Release",
    "TrashEntry",
    "alone_in",
    "entries",
    "finish",
    "free",
    "full_disk_told",
    "remove_run",
    "restore",
    "settle",
]  # fmt: skip

KEEP_S = 7 * 86_400.0
"""The time that something stays in the trash, in seconds."""

# Asks the daemons that have a run open to let it go. Returns False if one of them does not.
Release = Callable[[Path], bool]
_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class TrashEntry:
    """Something in the trash.

    Attributes:
        place: Its directory in the trash.
        name: The run that was removed, or whose series were.
        removed_s: When, as seconds since 1970.
        nbytes: The bytes of its files.
        is_run: Whether it is a whole run.
        is_marked: Whether it is being freed.
    """

    place: Path
    name: str
    removed_s: float
    nbytes: int
    is_run: bool
    is_marked: bool

    def is_due(self, now_s: float) -> bool:
        """Return whether it has been in the trash for seven days, or is being freed."""
        return self.is_marked or now_s - self.removed_s >= KEEP_S


@contextlib.contextmanager
def alone_in(run: Path, release: Release) -> Iterator[RunFacts]:
    """Hold a run for a removal, and yield what is known of it.

    Args:
        run: The run.
        release: Asks the daemons that have it open to let it go.

    Raises:
        CapdError: The run may not be removed. The message says why.
    """
    check_place(run)
    check_held(run)
    try:
        lock = RunLock.alone(run)
    except StoreBusy:
        if not release(run):
            raise
        lock = RunLock.alone(run, _PATIENCE_S)
    with lock:
        # It may have changed before the lock was held.
        yield check_held(run, is_alone=True)


def remove_run(run: Path, by: str, release: Release, planned: RunFacts | None = None) -> Path:
    """Move a run into the trash. Return its entry there.

    Args:
        run: The run.
        by: The user that removes it.
        release: Asks the daemons that have it open to let it go.
        planned: What was known when its removal was decided. None: whatever the run holds now is removed.

    Raises:
        CapdError: The run may not be removed, or a job continued it in the meantime. The message says why.
        OSError: The disk refused. A later call continues.
    """
    with alone_in(run, release) as facts:
        if planned is not None and (facts.records, facts.ranks) != (planned.records, planned.ranks):
            raise StoreBusy(f"{run} was continued in the meantime, nothing removed; decide again")
        with full_disk_told(run.parent):
            mark = tombstone_in(run_attributes(run, removed=True))
            if mark is None:
                mark = Tombstone.now(by)
                failpoint("trash.before_mark")
                change_attributes(run, lambda capd: capd.update(removed=asdict(mark)))
            return _move(run, mark)


@contextlib.contextmanager
def full_disk_told(root: Path, *, is_removal: bool = True) -> Iterator[None]:
    """Turn an OSError for no space into a StoreFull that says how to make room."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        # For a restore the trash must stay.
        first = f"free the trash with `capd gc {root} --all --yes`, or " if is_removal else ""
        raise StoreFull(
            f"the disk is full, and some KiB must be written first; {first}delete another file"
        ) from error


def _move(run: Path, mark: Tombstone) -> Path:
    """Move a run with a tombstone into the trash. The caller holds its lock."""
    failpoint("trash.after_mark")
    for node in nodes_of(run):
        with contextlib.suppress(OSError):
            # A copy of the catalog on the local disk, if the store is on a network file system.
            CatalogPlace(node_directory(run, node)).discard()
    # What the flight recorder of a killed daemon holds outside of the run.
    discard_held(run)
    note = note_path(run)
    sync_paths(make_directory(note.parent), run.parent)
    write_durably(note, note_payload(mark), note.parent / ".note.tmp")
    failpoint("trash.after_note")
    # The entry has the present time. The mark may be old: seven days begin with the move.
    entry = new_entry(run.parent)
    try:
        rename(run, entry / run.name)
    except FileNotFoundError:
        # `capd gc` took the empty entry of a daemon for a leftover.
        entry = new_entry(run.parent)
        rename(run, entry / run.name)
    sync_paths([entry, run.parent], run.parent)
    failpoint("trash.after_rename")
    return entry


def finish(root: Path, failed: Callable[[Path, Exception], None]) -> None:
    """Complete the removals of runs that a kill interrupted.

    Args:
        root: The store root.
        failed: Is told of each run that stays. The others go on.
    """
    for run in run_paths(root):
        try:
            settle(run)
        except (CapdError, OSError) as error:
            failed(run, error)


def settle(run: Path) -> None:
    """Complete the removal of a run, if a kill interrupted one.

    Raises:
        StoreBusy: Another command removes the run and does not end.
        StoreError: The trash cannot take it.
        OSError: The disk refused.
    """
    if run.is_symlink() or _mark_of(run) is None:
        return
    try:
        lock = RunLock.alone(run, _PATIENCE_S)
    except (StoreBusy, FileNotFoundError):
        if _mark_of(run) is None:
            # Another command completed it.
            return
        raise
    with lock:
        mark = _mark_of(run)
        if mark is not None:
            check_trash(run.parent)
            _move(run, mark)


def _mark_of(run: Path) -> Tombstone | None:
    try:
        return tombstone_in(run_attributes(run, removed=True))
    except (NotAStore, OSError):
        return None


def restore(run: Path) -> None:
    """Bring a removed run back to its place. If it was removed several times, the newest one.

    Raises:
        NotAStore: The trash has no such run.
        StoreError: Something else has its name.
        StoreFull: The disk is full.
        OSError: The disk refused. A later call continues.
    """
    if os.path.lexists(run):
        if run.is_symlink() or _mark_of(run) is None:
            raise StoreError(f"{run} is there already; rename it before the removed one is brought back")
        with RunLock.alone(run, _PATIENCE_S):
            # A kill interrupted its removal.
            change_attributes(run, _unmark)
            unlink(note_path(run), missing_ok=True)
            return
    found = [one for one in entries(run.parent) if one.is_run and one.name == run.name and not one.is_marked]
    if not found:
        raise NotAStore(f"no run {run.name} in the trash of {run.parent}; `capd gc {run.parent}` lists it")
    newest = max(found, key=lambda one: (one.removed_s, one.place.name))
    with full_disk_told(run.parent, is_removal=False):
        change_attributes(newest.place / run.name, _unmark)
    failpoint("restore.before_rename")
    rename(newest.place / run.name, run)
    sync_paths([newest.place, run.parent], run.parent)
    failpoint("restore.after_rename")
    unlink(note_path(run), missing_ok=True)
    with contextlib.suppress(OSError):
        newest.place.rmdir()


def _unmark(capd: dict[str, object]) -> None:
    capd.pop("removed", None)


def entries(root: Path) -> list[TrashEntry]:
    """Return what is in the trash of a store root, the oldest first. What no removal put there is left out."""
    found: list[TrashEntry] = []
    trash = trash_of(root)
    is_own = trash.is_dir() and not trash.is_symlink() and not trash.parent.is_symlink()
    for place in sorted(trash.iterdir()) if is_own else ():
        removed_s = _time_of(place.name)
        if removed_s is None or place.is_symlink() or not place.is_dir():
            continue
        inside = list(place.iterdir())
        if len(inside) > 1 or not all(map(_is_removed, inside)):
            continue
        name = inside[0].name if inside else ""
        # A kill left an empty one before the run came, or after the run was brought back.
        is_marked = not inside or place.name.endswith(DELETING)
        is_run = not name.endswith(".series")
        found.append(
            TrashEntry(place, name.removesuffix(".series"), removed_s, walked(place)[1], is_run, is_marked)
        )
    return found


def _is_removed(place: Path) -> bool:
    """Return whether something in an entry can be a run, or the series of one."""
    return place.name.endswith((".zarr", ".zarr.series")) and place.is_dir() and not place.is_symlink()


def free(entry: TrashEntry) -> int:
    """Delete what is in an entry of the trash. Symbolic links are not followed. Return the freed bytes.

    Raises:
        StoreError: A file cannot be deleted. A later call continues.
        OSError: The entry cannot be marked.
    """
    if not entry.name:
        with contextlib.suppress(OSError):
            # Not empty any more: a daemon moved a run into it in the meantime.
            entry.place.rmdir()
        return 0
    place = entry.place if entry.place.name.endswith(DELETING) else _marked(entry.place)
    failpoint("empty.after_mark")
    remove_tree(place)
    failpoint("empty.after_tree")
    if place.exists():
        raise StoreError(f"{place} cannot be deleted; check its permissions, then `capd gc --yes` again")
    sync_paths([place.parent], place.parent)
    return entry.nbytes


def _marked(place: Path) -> Path:
    """Mark an entry as being freed. Return its new place."""
    target = place.with_name(f"{place.name}{DELETING}")
    rename(place, target)
    sync_paths([place.parent], place.parent)
    return target


def _time_of(name: str) -> float | None:
    """Return the time of removal in the name of an entry; None if the name has another form."""
    stamp, _, number = name.removesuffix(DELETING).partition("-")
    try:
        found = time.strptime(stamp, "%Y%m%dT%H%M%SZ")
    except ValueError:
        return None
    return float(calendar.timegm(found)) if number.isdecimal() else None
