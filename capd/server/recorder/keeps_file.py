"""The keeps of a run: the file of this node, `window/keeps.jsonl`, and the notes to other nodes in `.capd/keeps`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from capd.store.disk.files import make_directory, new_file, opened, pwrite_all, truncate
from capd.store.keeps.file import keeps_path, read_keeps
from capd.store.keeps.keep import Keep, keep_line, keep_of

__all__ = ["KeepsFile"]

_MAX_NOTE_NBYTES = 4096
# Notes of one run that are looked at.
_MAX_NOTES = 65_536
_NOTE = re.compile(r"(\d{1,19})-(\d{1,19})-(\d{1,19})-([A-Za-z0-9._-]{1,128})\.json")


class KeepsFile:
    """The keeps of one run on one node, and those that other nodes ask for. One thread has it."""

    def __init__(self, run: Path, node: str) -> None:
        """Remember the places."""
        self._path, self._notes, self._node = keeps_path(run, node), run / ".capd" / "keeps", node
        self._seen: set[str] = set()

    def earlier(self) -> list[Keep]:
        """Return the keeps of earlier daemons. Lines that are none are left out. Raises OSError or StoreError."""
        held = read_keeps(self._path)
        if held.torn_nbytes:
            truncate(self._path, held.nbytes)
        return held.items

    def append(self, keep: Keep) -> None:
        """Append a keep to the file. Raises OSError."""
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        with opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW) as fd:
            end = os.fstat(fd).st_size
            try:
                pwrite_all(fd, [keep_line(keep)], end)
            except OSError:
                # Otherwise the next line would continue a part of this one.
                os.ftruncate(fd, end)
                raise

    def tell(self, keep: Keep) -> None:
        """Leave a note for the daemons of other nodes. Raises OSError."""
        make_directory(self._notes)
        # Two keeps of one iteration may differ in what follows it.
        name = f"{keep.attempt}-{keep.first}-{keep.last}-{self._node}.json"
        self._seen.add(name)
        try:
            new_file(self._notes / name, [keep_line(keep)])
        except FileExistsError:
            return

    def told(self) -> Iterator[Keep]:
        """Yield the keeps that other nodes asked for since the last call."""
        try:
            names = set(os.listdir(self._notes))
        except OSError:
            return
        for name in sorted(names - self._seen):
            found = _NOTE.fullmatch(name)
            if len(self._seen) >= _MAX_NOTES:
                return
            if found is None or found[4] == self._node:
                self._seen.add(name)
                continue
            keep = self._read(name)
            if keep is None:
                continue
            self._seen.add(name)
            *numbers, node = found.groups()
            if ([keep.attempt, keep.first, keep.last], keep.node) == ([*map(int, numbers)], node):
                yield keep

    def _read(self, name: str) -> Keep | None:
        """Return a note; None if it is not whole yet, or none at all."""
        try:
            fd = os.open(self._notes / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return keep_of(os.read(fd, _MAX_NOTE_NBYTES))
        except OSError:
            return None
        finally:
            os.close(fd)
