"""One inode of a LossyDisk and what of it is durable; and how the durable tree differs from the present one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

__all__ = ["Changes", "Node"]

SECTOR_NBYTES = 512  # what a disk writes whole

_pwrite = os.pwrite  # as it was before a test put a fault in its place


class Node:
    """One inode, kept alive by a descriptor, and what of it is durable."""

    def __init__(self, path: Path | None, *, is_directory: bool, frozen: bytes = b"") -> None:
        """path: where it lies now; None for one that only a power loss would bring back, with `frozen` as content."""
        self.is_directory = is_directory
        self.frozen = frozen
        self.pin = -1 if path is None else os.open(path, os.O_PATH | os.O_CLOEXEC)
        self.content = b""
        self.entries: dict[str, Node] = {}
        self.lost: dict[int, bytes] = {}  # sector → what a failed sync threw away

    @property
    def opened(self) -> str:
        """A path that leads to the inode whatever name it has."""
        return f"/proc/self/fd/{self.pin}"

    def read(self) -> bytes:
        if self.pin < 0:
            return self.frozen
        with open(self.opened, "rb") as file:
            return file.read()

    def writable(self) -> bytes:
        """What a sync can still make durable: the content, but old sectors where a failed sync threw the new away."""
        now = bytearray(self.read())
        for sector, thrown in self.lost.items():
            at = sector * SECTOR_NBYTES
            if now[at : at + SECTOR_NBYTES] == thrown:
                old = self.content[at : at + len(thrown)]
                now[at : at + len(thrown)] = old + bytes(len(thrown) - len(old))
        return bytes(now)

    def sync(self) -> None:
        now = self.read()
        self.content = self.writable()
        self.lost = {n: thrown for n, thrown in self.lost.items() if _sector(now, n) == thrown}

    def fail_sync(self, *, evict: bool) -> None:
        """evict: the page cache forgets, too, so that readers see the old bytes."""
        now, durable = self.read(), self.content
        for sector in range(-(-len(now) // SECTOR_NBYTES)):
            new, old = _sector(now, sector), _sector(durable, sector)
            if new != old:
                self.lost[sector] = new
                if evict:
                    self._put(sector, (old + bytes(len(new)))[: len(new)])

    def _put(self, sector: int, payload: bytes) -> None:
        fd = os.open(self.opened, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _pwrite(fd, payload, sector * SECTOR_NBYTES)
        finally:
            os.close(fd)

    def torn(self, random: Random) -> bytes:
        """A content that a power loss may leave: the durable one, the present one, or sectors of both."""
        old, new = self.content, self.writable()
        if old == new or random.random() < 0.4:
            return random.choice((old, new))
        shorter, longer = sorted((len(old), len(new)))
        size = random.choice((len(old), len(new), random.randint(shorter, longer)))
        share = random.random()
        sectors = [
            _padded(new if random.random() < share else old, sector)
            for sector in range(-(-size // SECTOR_NBYTES))
        ]
        return b"".join(sectors)[:size]

    def close(self) -> None:
        if self.pin >= 0:
            os.close(self.pin)


class Changes:
    """The names that differ between the durable tree and the present one, and which of them are one rename."""

    def __init__(self, directories: list[tuple[Node, dict[str, Node]]]) -> None:
        self.now = dict(directories)
        self._durable_places: dict[Node, list[tuple[Node, str]]] = {}
        self._present_places: dict[Node, list[tuple[Node, str]]] = {}
        for directory, now in directories:
            for entries, places in (
                (directory.entries, self._durable_places),
                (now, self._present_places),
            ):
                for name, node in entries.items():
                    places.setdefault(node, []).append((directory, name))
        self.all: list[tuple[Node, str]] = [
            (directory, name)
            for directory, now in directories
            for name in sorted(now.keys() | directory.entries.keys())
            if now.get(name) is not directory.entries.get(name)
        ]
        self._differs = set(self.all)

    def with_moves(self, change: tuple[Node, str]) -> list[tuple[Node, str]]:
        """The change, with those that are one step with it, and the directories that a moved file needs."""
        found: dict[tuple[Node, str], None] = {change: None}
        todo = [change]
        while todo:
            directory, name = todo.pop()
            for node in (directory.entries.get(name), self.now[directory].get(name)):
                before = self._durable_places.get(node, []) if node is not None else []
                after = self._present_places.get(node, []) if node is not None else []
                if before and after and before != after:
                    parents = [p for owner, _ in after for p in self._way_to(owner)]
                    for other in (*before, *after, *parents):
                        if other in self._differs and other not in found:
                            found[other] = None
                            todo.append(other)
        return list(found)

    def _way_to(self, directory: Node) -> Iterator[tuple[Node, str]]:
        for place in self._present_places.get(directory, []):
            yield place
            yield from self._way_to(place[0])

    def apply(self, entries: dict[str, Node], directory: Node, name: str) -> None:
        """Bring one name of `entries` to what `directory` holds now."""
        if (node := self.now[directory].get(name)) is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _sector(content: bytes, number: int) -> bytes:
    return content[number * SECTOR_NBYTES : (number + 1) * SECTOR_NBYTES]


def _padded(content: bytes, number: int) -> bytes:
    found = _sector(content, number)
    return found + bytes(SECTOR_NBYTES - len(found))
