"""The files of the flight recorder's spool: where they lie, and what a daemon that was killed has left of a run.

    /dev/shm/capd-<uid>/window-<place>/<run>/*.held      the part in memory
    <run>.zarr/.capd/node=<node>/window/*.held           the part on disk
    <run>.zarr/.capd/node=<node>/window/elsewhere        the directory of the part on disk, with `[window] directory`
    <run>.zarr/.capd/node=<node>/window/let-go.txt       what was let go, for the next daemon
    <run>.zarr/.capd/node=<node>/window/keeps.jsonl      the keeps
    <run>.zarr/.capd/keeps/*.json                        keeps that other nodes are told of

With `[window] directory`, the part on disk lies in `<directory>/window-<place>/<run>` instead. All but the keeps belong
to the daemons of one store root: no copy of the run has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from capd.space import shown_size
from capd.store.disk.files import make_directory, opened, unlink, write_file
from capd.store.disk.layout import node_directory, nodes_of

__all__ = [
    "LEDGER_NAME", "SHARED_MEMORY", "LeftSegment", "describe_left", "discard_held", "elsewhere_of", "held_name",
    "is_of_daemons", "left_segments", "left_spans", "memory_directory", "note_elsewhere", "spool_place",
    "window_directory", "window_nbytes",
]  # fmt: skip

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the memory of the node; the recorder makes a directory of its own
LEDGER_NAME = "let-go.txt"
_ELSEWHERE = "elsewhere"
_MAX_PATH_NBYTES = 4096
_NAME = re.compile(r"a(\d{1,19})-i(\d{1,19})-\d{1,20}\.held")


@dataclass(frozen=True, slots=True)
class LeftSegment:
    """A file of the spool with records of one iteration."""

    path: Path
    attempt: int
    iteration: int
    nbytes: int
    in_memory: bool


def window_directory(run: Path, node: str) -> Path:
    """Return the directory of a node's recorder in a run."""
    return node_directory(run, node) / "window"


def spool_place(root: Path, node: str) -> str:
    """Return the name of what the recorder of a store root and node has outside of the runs."""
    place = hashlib.sha256(os.fsencode(os.path.realpath(root)) + b"\0" + node.encode()).hexdigest()[:16]
    return f"window-{place}"


def memory_directory(root: Path, node: str) -> Path:
    """Return the directory of a node's recorder in the memory of the machine."""
    return SHARED_MEMORY / f"capd-{os.geteuid()}" / spool_place(root, node)


def held_name(name: str) -> tuple[int, int] | None:
    """Return the attempt and the iteration in the name of a file of the spool; None for another name."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]))


def left_segments(run: Path, node: str) -> Iterator[LeftSegment]:
    """Yield what the spool of a node holds of a run, on this machine. A live daemon may change it."""
    places = [(directory, directory == _memory_of(run, node)) for directory in _outside(run, node)]
    for directory, in_memory in [*places, (window_directory(run, node), False)]:
        for path in _files(directory):
            name = held_name(path.name)
            with contextlib.suppress(OSError):
                if name is not None:
                    yield LeftSegment(path, *name, path.lstat().st_size, in_memory)


def left_spans(root: Path, node: str) -> Iterator[int]:
    """Yield the number of held iterations of each run that a recorder of this node has left something of."""
    for run in root.glob("*.zarr"):
        numbers = {one.iteration for one in left_segments(run, node)}
        if numbers or (window_directory(run, node) / LEDGER_NAME).exists():
            yield max(numbers) - min(numbers) + 1 if numbers else 0


def describe_left(held: Sequence[LeftSegment]) -> str:
    """Return one line about what a daemon that is gone has left in its spool, and what to do."""
    numbers = sorted({one.iteration for one in held})
    which = f"iteration {numbers[0]}" if len(numbers) == 1 else f"iterations {numbers[0]} to {numbers[-1]}"
    return (
        f"{shown_size(sum(one.nbytes for one in held))} of {which} are held by a flight recorder whose daemon does not "
        "run; start the daemon with [window] again: it stores what was asked for, and lets the rest go"
    )


def window_nbytes(run: Path, node: str) -> int:
    """Return the bytes of a node's recorder in a run: held records, the keeps, and what was let go."""
    total = 0
    for path in _files(window_directory(run, node)):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total


def note_elsewhere(run: Path, node: str, directory: Path) -> None:
    """Note in a run that the part on disk of its spool lies in `directory`. Raises OSError."""
    path = window_directory(run, node) / _ELSEWHERE
    make_directory(path.parent)
    write_file(path, os.fsencode(directory))


def elsewhere_of(run: Path, node: str) -> Path | None:
    """Return the directory outside of the run that a daemon has noted for the part on disk; None if there is none.

    The note may come from anybody. The directory has a name that only a recorder of this store root gives.
    """
    path = window_directory(run, node) / _ELSEWHERE
    try:
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            noted = os.read(fd, _MAX_PATH_NBYTES)
    except OSError:
        return None
    directory = Path(os.fsdecode(noted.replace(b"\0", b"")))
    return directory / spool_place(run.parent, node) if directory.is_absolute() else None


def discard_held(run: Path) -> None:
    """Delete what is held of a run outside of it on this machine, as far as possible. No daemon has the run."""
    for directory in (directory for node in nodes_of(run) for directory in _outside(run, node)):
        with contextlib.suppress(OSError):
            for path in _files(directory):
                if held_name(path.name) is not None:
                    unlink(path)
            directory.rmdir()
            directory.parent.rmdir()


def is_of_daemons(path: PurePath) -> bool:
    """Return whether a file of a run, relative to it, belongs to the recorders of its store root alone."""
    parts = path.parts
    if parts[:2] == (".capd", "keeps"):
        return True
    return parts[:1] == (".capd",) and parts[2:3] == ("window",) and parts[3:] != ("keeps.jsonl",)


def _memory_of(run: Path, node: str) -> Path:
    return memory_directory(run.parent, node) / run.name.removesuffix(".zarr")


def _outside(run: Path, node: str) -> list[Path]:
    """Return the directories outside of a run that hold records of it, if they are the user's own."""
    memory, name = memory_directory(run.parent, node), run.name.removesuffix(".zarr")
    found = [memory / name] if _is_own(memory.parent) else []
    elsewhere = elsewhere_of(run, node)
    return found if elsewhere is None or not _is_own(elsewhere) else [*found, elsewhere / name]


def _is_own(directory: Path) -> bool:
    """Return whether nobody else can have made what is below a directory."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _files(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
