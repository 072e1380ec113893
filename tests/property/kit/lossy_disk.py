"""A directory tree that remembers what of it a disk would still hold after a power loss.

The files are real. Beside each inode stands what was durable at its last sync: a file's content, a directory's
entries. From that and from what the tree holds now, images of it are built: after a kill (everything written is
there) and after a power loss (what was synced is there, of the rest any part).

A rename is atomic, as on journalling file systems: the old name or the new one, and syncing either directory
makes it durable. A sync that failed throws away what it could not write: the kernel calls those pages clean.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.property.kit.inodes import Changes, Node

__all__ = ["LossyDisk"]


class LossyDisk:
    """The tree below `root`, all of it durable at first. catalog: a path below it, of an SQLite database.

    SQLite writes past this class, so a database with its journal is one thing: what `catalog_is_durable` saw last,
    or all of it as it is now.
    """

    def __init__(self, root: Path, catalog: str) -> None:
        self.root, self.catalog = root, catalog
        self._nodes: dict[int, Node] = {}
        self._top = self._node(root, is_directory=True)
        self._durable_catalog: dict[str, bytes] = {}
        self.sync_all()

    def close(self) -> None:
        """Let go of all inodes."""
        for node in self._nodes.values():
            node.close()
        self._nodes.clear()

    def holds(self, fd: int) -> bool:
        """Whether a descriptor leads into the tree."""
        return os.readlink(f"/proc/self/fd/{fd}").startswith(f"{self.root}")

    # -- what becomes durable -----------------------------------------------------------------------------

    def sync(self, fd: int) -> None:
        """fsync of a file or a directory."""
        node = self._of(fd)
        if node.is_directory:
            self._sync_entries(node)
        else:
            node.sync()

    def fail_sync(self, fd: int, *, evict: bool) -> None:
        """fsync that could not write."""
        node = self._of(fd)
        if not node.is_directory:
            node.fail_sync(evict=evict)

    def sync_all(self) -> None:
        """syncfs."""
        for directory, now in self._directories():
            directory.entries = now
            for node in now.values():
                if not node.is_directory:
                    node.sync()
        self.catalog_is_durable()

    def fail_sync_all(self, *, evict: bool) -> None:
        """syncfs that could not write any file."""
        for _, now in self._directories():
            for node in now.values():
                if not node.is_directory:
                    node.fail_sync(evict=evict)

    def forgive(self) -> None:
        """What failed syncs threw away counts as written again, as behind a kill."""
        for node in self._nodes.values():
            node.lost.clear()

    def catalog_is_durable(self) -> None:
        """The database is on disk as it is now."""
        self._durable_catalog = self._read_catalog()

    def _read_catalog(self) -> dict[str, bytes]:
        found = {}
        for suffix in ("", "-wal"):
            with contextlib.suppress(FileNotFoundError):
                found[self.catalog + suffix] = (self.root / (self.catalog + suffix)).read_bytes()
        return found

    # -- inodes and names ---------------------------------------------------------------------------------

    def _of(self, fd: int) -> Node:
        return self._node(Path(f"/proc/self/fd/{fd}"), is_directory=os.path.isdir(f"/proc/self/fd/{fd}"))

    def _node(self, path: Path, *, is_directory: bool, inode: int | None = None) -> Node:
        inode = path.stat().st_ino if inode is None else inode
        if inode not in self._nodes:
            self._nodes[inode] = Node(path, is_directory=is_directory)
        return self._nodes[inode]

    def _now(self, directory: Node) -> dict[str, Node]:
        """The entries of a directory as they are, without the database's files, by name."""
        if directory.pin < 0:
            return {}
        catalog = Path(self.catalog).name
        with os.scandir(directory.opened) as found:
            entries = sorted((e.name, e) for e in found if not e.name.startswith(catalog))
        return {
            name: self._node(Path(e.path), is_directory=e.is_dir(), inode=e.inode()) for name, e in entries
        }

    def _directories(self) -> Iterator[tuple[Node, dict[str, Node]]]:
        """Every directory that has a name, durable or not, and its entries as they are."""
        seen = {self._top}
        todo = [self._top]
        while todo:
            directory = todo.pop()
            now = self._now(directory)
            yield directory, now
            for node in (*now.values(), *directory.entries.values()):
                if node.is_directory and node not in seen:
                    seen.add(node)
                    todo.append(node)

    def _sync_entries(self, directory: Node) -> None:
        changes = Changes(list(self._directories()))
        for change in [c for c in changes.all if c[0] is directory]:
            for owner, name in changes.with_moves(change):
                changes.apply(owner.entries, owner, name)

    # -- images -------------------------------------------------------------------------------------------

    def after_kill(self, target: Path) -> LossyDisk:
        """A copy of the tree as it is, in `target`; what was not durable is not durable there either.

        What a failed sync threw away counts as written again: the next process cannot know of it.
        """
        twins: dict[Node, Node] = {}
        self._copy(self._top, target, twins)
        for path, payload in self._read_catalog().items():
            (target / path).write_bytes(payload)
        copy = LossyDisk.__new__(LossyDisk)
        copy.root, copy.catalog, copy._top = target, self.catalog, twins[self._top]
        copy._durable_catalog = dict(self._durable_catalog)
        copy._nodes = {os.stat(twin.opened).st_ino: twin for twin in twins.values()}
        todo = list(twins)
        while todo:
            node = todo.pop()
            twin = twins[node]
            twin.content = node.content
            for name, child in node.entries.items():
                if child not in twins:
                    twins[child] = Node(None, is_directory=child.is_directory, frozen=_content(child))
                    todo.append(child)
                twin.entries[name] = twins[child]
        return copy

    def _copy(self, node: Node, path: Path, twins: dict[Node, Node]) -> None:
        if node in twins:
            os.link(twins[node].opened, path, follow_symlinks=True)
            return
        if node.is_directory:
            path.mkdir()
        else:
            path.write_bytes(node.read())
        twins[node] = Node(path, is_directory=node.is_directory)
        for name, child in self._now(node).items() if node.is_directory else ():
            self._copy(child, path / name, twins)

    def after_power_loss(self, random: Random, target: Path) -> LossyDisk:
        """What a disk could hold if the power failed now, in `target`; all of that is durable there."""
        changes = Changes(list(self._directories()))
        share = random.choice((0.0, 0.5, 1.0, random.random()))
        view = {directory: dict(directory.entries) for directory in changes.now}
        for change in random.sample(changes.all, len(changes.all)):
            if random.random() < share:
                for owner, name in changes.with_moves(change):
                    changes.apply(view[owner], owner, name)
        self._write(self._top, target, view, random)
        catalog = random.choices((self._durable_catalog, self._read_catalog(), {}), (5, 5, 1))[0]
        for path, payload in catalog.items():
            if (target / path).parent.is_dir():
                (target / path).write_bytes(payload)
        return LossyDisk(target, self.catalog)

    def _write(self, node: Node, path: Path, view: dict[Node, dict[str, Node]], random: Random) -> None:
        if not node.is_directory:
            path.write_bytes(node.torn(random))
            return
        path.mkdir()
        for name, child in sorted(view[node].items()):
            self._write(child, path / name, view, random)


def _content(node: Node) -> bytes:
    return b"" if node.is_directory else node.read()
