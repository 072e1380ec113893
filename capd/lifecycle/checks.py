"""The refusals of a removal: what is no run, what belongs to others, what is pinned or live."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path

from capd.errors import ConfigError, NotAStore, StoreBusy, StoreError
from capd.lifecycle.inventory import RunFacts, look_at
from capd.store.documents.tombstone import check_present
from capd.store.documents.zarr_json import run_attributes
from capd.store.remove.trash_place import check_trash

__all__ = ["check_held", "check_place", "check_root", "current_user", "why_held"]

_MOUNTS = Path("/proc/self/mountinfo")
# File names have at most 255 bytes, including the `.series` of the trash.
_MAX_NAME_NBYTES = 248


def current_user() -> str:
    """Return the name of this user, else the number."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"user {os.geteuid()}"


def check_root(root: Path) -> None:
    """Check that runs below a directory may be removed.

    Raises:
        NotAStore: It is no directory.
        ConfigError: It is a symbolic link, or an entry of the trash.
    """
    if root.absolute().parts[-3:-1] == (".capd", "trash"):
        raise ConfigError(
            f"{root} is in the trash; name the directory of runs: `capd gc` frees it, `capd rm --restore RUN` "
            "brings it back"
        )
    if root.is_symlink():
        raise ConfigError(f"{root} is a symbolic link; name the directory itself: {os.path.realpath(root)}")
    if not root.is_dir():
        raise NotAStore(f"{root} is no directory; name a directory of runs")


def check_place(run: Path) -> None:
    """Check that a path is a run of this user, which can be moved as a whole.

    Raises:
        NotAStore: It is no run of capd.
        ConfigError: It is a symbolic link.
        StoreError: It belongs to another user, holds a mount, has too long a name, or cannot be renamed into the trash.
    """
    if run.is_symlink():
        raise ConfigError(
            f"{run} is a symbolic link, nothing removed; name the run itself: {os.path.realpath(run)}"
        )
    check_root(run.parent)
    if not run.is_dir():
        check_present(run)
        raise NotAStore(
            f"{run} is no run directory, nothing removed; `capd runs {run.parent}` lists the runs"
        )
    if run.suffix != ".zarr":
        raise NotAStore(f"{run} does not end in .zarr, nothing removed; only a run of capd is removed")
    try:
        run_attributes(run, removed=True)
    except NotAStore as error:
        raise NotAStore(f"nothing removed, because only a run of capd is: {error}") from error
    if len(os.fsencode(run.name)) > _MAX_NAME_NBYTES:
        raise StoreError(
            f"{run} has more than {_MAX_NAME_NBYTES} bytes in its name, nothing removed; rename it first"
        )
    check_trash(run.parent)
    owner = run.stat().st_uid
    if owner != os.geteuid():
        raise StoreError(f"{run} belongs to user {_name(owner)}, nothing removed; that user removes it")
    mounts = _mounts_below(run)
    if mounts:
        raise StoreError(f"{mounts[0]} is a mount inside the run, nothing removed; unmount it first")


def why_held(facts: RunFacts) -> str:
    """Return why a run stays whatever a policy says; "" if nothing holds it."""
    if facts.is_pinned:
        return "pinned"
    if facts.state == "live":
        return "live"
    if facts.state == "unreadable":
        return "cannot be read"
    try:
        check_place(facts.path)
    except StoreError as error:
        return "belongs to another user" if "belongs to" in str(error) else "cannot be moved"
    except ConfigError:
        return "a symbolic link"
    return ""


def check_held(run: Path, *, is_alone: bool = False) -> RunFacts:
    """Return what is known of a run that may be removed.

    Args:
        run: The run.
        is_alone: Whether the caller holds the lock of the run alone.

    Raises:
        StoreBusy: A rank captures into it, or may come back.
        StoreError: It is pinned, or cannot be read.
    """
    facts = look_at(run, is_alone=is_alone)
    if facts.state == "live":
        raise StoreBusy(f"{run} is live ({facts.problem}), nothing removed; let the job end first")
    if facts.is_pinned:
        raise StoreError(f"{run} is pinned, nothing removed; `capd unpin {run}` first")
    if facts.state == "unreadable":
        raise StoreError(
            f"{run} cannot be read ({facts.problem}), nothing removed; `capd verify {run}` tells more, or remove it by "
            "hand"
        )
    return facts


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _mounts_below(run: Path) -> list[str]:
    """Return the mount points at or below a directory, also those of bind mounts."""
    place = os.path.realpath(run)
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return [place] if os.path.ismount(place) else []
    points = (_unescaped(line.split(" ")[4]) for line in lines if line.count(" ") > 4)
    return [point for point in points if point == place or point.startswith(f"{place}/")]


def _unescaped(field: str) -> str:
    """Return a path of the mount table, in which blanks, tabs, newlines and backslashes are octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
