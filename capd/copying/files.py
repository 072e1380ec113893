"""Copies or links the files of a run, each atomically: a file under its own name is whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from capd.errors import StoreError
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import copy_range, link, make_directory, opened, rename, sync_paths, unlink
from capd.store.documents.remote_state import REMOTE_STATE_NAME
from capd.store.keeps.held_files import is_of_daemons

__all__ = ["Progress", "copy_file", "copy_tree", "files_of", "link_file"]

Progress = Callable[[int], None]

_TEMPORARY = ".copying"
# SQLite's shared memory belongs to running processes.
_LEFT_OUT = ("-shm",)


def files_of(run: Path) -> Iterator[Path]:
    """Yield the files of a run, relative to it, in order.

    Raises:
        StoreError: The run holds something else than regular files and directories.
    """
    for directory, names, files in os.walk(run):
        names.sort()
        here = Path(directory)
        for name in (*names, *sorted(files)):
            mode = (here / name).lstat().st_mode
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                raise StoreError(f"{here / name} is not a regular file or directory; a run has none of these")
        for name in sorted(files):
            path = (here / name).relative_to(run)
            if (
                not name.endswith((*_LEFT_OUT, _TEMPORARY))
                and not _is_of_upload(path)
                and not is_of_daemons(path)
            ):
                yield path


def _is_of_upload(path: Path) -> bool:
    """Return whether a file tells where the run is uploaded to: a copy goes elsewhere."""
    return path.parts[:1] == (".capd",) and path.parts[2:3] in (("upload",), (REMOTE_STATE_NAME,))


def copy_tree(source: Path, target: Path, progress: Progress) -> None:
    """Copy all files of a run, durably. Files that are already there with the same size and time are kept.

    Raises:
        StoreError: The source changes, or holds something else than files.
        OSError: A file cannot be read or written.
    """
    wanted = list(files_of(source))
    make_directory(target)
    for path in wanted:
        progress(copy_file(source / path, target / path))
    known = set(wanted)
    for path in list(files_of(target)):
        if path not in known:
            # The source lost it since the killed command.
            unlink(target / path)
    sync_paths([target / path for path in wanted], target)
    sync_paths({(target / path).parent for path in wanted} | {target}, target)
    failpoint("copy.after_files")


def copy_file(source: Path, target: Path) -> int:
    """Copy one file unless it is already there. Return its bytes."""
    make_directory(target.parent)
    with opened(source, os.O_NOFOLLOW) as fd:
        found = os.fstat(fd)
        if target.exists():
            held = target.stat()
            if (held.st_size, held.st_mtime_ns) == (found.st_size, found.st_mtime_ns):
                return found.st_size
        temporary = target.with_name(f"{target.name}{_TEMPORARY}")
        with opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as copy:
            copy_range(fd, copy, found.st_size)
        os.utime(temporary, ns=(found.st_atime_ns, found.st_mtime_ns))
    failpoint("copy.before_rename")
    rename(temporary, target)
    failpoint("copy.after_file")
    return found.st_size


def link_file(source: Path, target: Path) -> int:
    """Give a file a second name, or copy it to another file system. A file that is already there is kept."""
    if target.exists():
        return source.stat().st_size
    make_directory(target.parent)
    try:
        link(source, target)
    except OSError:
        # Another file system, or one without links.
        return copy_file(source, target)
    failpoint("copy.after_file")
    return source.stat().st_size
