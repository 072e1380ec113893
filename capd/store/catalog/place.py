"""The place of a node's catalog: beside its spool, or on a local disk if the store is on a network file system.

All users of SQLite's write-ahead log need shared memory and locks, which network file systems do not provide. For such
a store the daemon works on a local copy and publishes snapshots into the store. Each snapshot replaces the previous one
atomically.

Readers on any machine see the snapshot. They also read the spool, which holds all newer records. A snapshot must
therefore be published before a shard leaves the spool.

A daemon always starts from the published snapshot, never from a local copy of an earlier daemon. The node may have run
on another machine in the meantime.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sqlite3
import tempfile
from pathlib import Path

from capd.store.catalog.rows import CATALOG_NAME
from capd.store.disk.files import make_directory, rename, sync_paths, unlink, write_file

__all__ = ["CatalogPlace", "is_network", "live_catalog", "publish_snapshot"]

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = frozenset(
    {
        "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs",
        "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "wekafs",
    }
)  # fmt: skip
_COPY_NBYTES = 8 << 20


def is_network(path: Path, mounts: Path = _MOUNTS) -> bool:
    """Return whether `path` is on a network, cluster or FUSE file system, according to the mount table.

    Args:
        mounts: A file in the format of /proc/self/mountinfo.
    """
    real = path.resolve()
    kind, depth = "", -1
    with contextlib.suppress(OSError):
        for line in mounts.read_text(errors="surrogateescape").splitlines():
            fields, mark, source = line.partition(" - ")
            if not mark:
                continue
            point = Path(_unescaped(fields.split(" ")[4]))
            # If two file systems are mounted at one place, the later one counts.
            if real.is_relative_to(point) and len(point.parts) >= depth:
                kind, depth = source.split(" ")[0], len(point.parts)
    return kind in _NETWORK or kind.startswith("fuse.")


def live_catalog(node_directory: Path) -> Path:
    """Return the path where the catalog of this node's part of a run is written.

    This is the node's directory unless it is on a network file system. Then it is a directory below $XDG_STATE_HOME
    (else ~/.local/state). If that is on the network, too, it is the temporary directory. Without any local disk it is
    the node's directory.
    """
    published = node_directory / CATALOG_NAME
    if not is_network(node_directory):
        return published
    place = hashlib.blake2b(os.fsencode(node_directory.resolve()), digest_size=12).hexdigest()
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    for root in (Path(state) / "capd", Path(tempfile.gettempdir()) / f"capd-{os.getuid()}"):
        with contextlib.suppress(OSError):
            if not is_network(root) and _is_private(root):
                directory = root / "catalogs" / place
                make_directory(directory)
                return directory / CATALOG_NAME
    return published


def publish_snapshot(db: sqlite3.Connection, scratch: Path, target: Path, spool: Path) -> None:
    """Replace `target` by a snapshot of the open catalog `db`, atomically and durably.

    Args:
        db: The live catalog.
        scratch: A local file for the snapshot. SQLite itself never writes to the network.
        target: The published catalog.
        spool: The node's spool directory, on the file system of `target`.

    Raises:
        OSError: The snapshot cannot be written. The previous one remains.
        sqlite3.Error: The catalog cannot be copied. The previous snapshot remains.
    """
    temporary = spool / "catalog.tmp"
    unlink(scratch, missing_ok=True)
    try:
        # SQLite would create the file with the mode of the umask.
        write_file(scratch, b"")
        copy = sqlite3.connect(scratch, isolation_level=None)
        try:
            db.backup(copy)
            # In this mode the readers of a snapshot create no other files.
            copy.execute("PRAGMA journal_mode=DELETE")
        finally:
            copy.close()
        write_file(temporary, b"")
        with scratch.open("rb") as source, temporary.open("r+b") as sink:
            shutil.copyfileobj(source, sink, _COPY_NBYTES)
        sync_paths([temporary], spool)
        rename(temporary, target)
        sync_paths([target.parent], spool)
    finally:
        for leftover in (scratch, temporary):
            with contextlib.suppress(OSError):
                unlink(leftover, missing_ok=True)


class CatalogPlace:
    """The two places of the catalog of one node's part of a run.

    Attributes:
        published: The catalog that readers find.
        live: The catalog that the daemon writes; often the same file.
    """

    def __init__(self, node_directory: Path) -> None:
        self.published = node_directory / CATALOG_NAME
        self.live = live_catalog(node_directory)
        self._spool = node_directory / "spool"

    @property
    def is_apart(self) -> bool:
        """Whether the live catalog is on a local disk and snapshots are published."""
        return self.live != self.published

    def fetch(self) -> None:
        """Replace the local copy by the published snapshot, or delete it if there is no snapshot."""
        if not self.is_apart:
            return
        self.discard()
        if self.published.is_file():
            write_file(self.live, b"")
            with self.published.open("rb") as source, self.live.open("r+b") as sink:
                shutil.copyfileobj(source, sink, _COPY_NBYTES)

    def publish(self, db: sqlite3.Connection) -> None:
        """Publish a snapshot if the live catalog is on a local disk. Raises OSError or sqlite3.Error."""
        if self.is_apart:
            publish_snapshot(db, self.live.with_suffix(".snapshot"), self.published, self._spool)

    def discard(self) -> None:
        """Delete the local copy. No process may have it open."""
        if self.is_apart:
            for suffix in ("", "-wal", "-shm", "-journal"):
                unlink(self.live.with_name(self.live.name + suffix), missing_ok=True)


def _is_private(root: Path) -> bool:
    """Return whether `root` is a directory of this user that nobody else can change. It is created if it is missing."""
    make_directory(root)
    found = root.lstat()
    return (
        root.is_dir() and not root.is_symlink() and found.st_uid == os.getuid() and not found.st_mode & 0o022
    )


def _unescaped(field: str) -> str:
    """Return a path of the mount table, in which blanks, tabs, newlines and backslashes are octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
