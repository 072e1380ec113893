"""Where a node's catalog is written: beside its spool, or on local disk when the store is on a network file system.

SQLite's write-ahead log needs memory and locks that all its readers share, which network file systems do not give.
There the daemon works on a local copy and publishes snapshots into the store, each replacing the one before in
one step. Readers, on any machine, see the snapshot; the spool, which they also read, holds whatever is newer,
provided that a snapshot is published before a shard leaves the spool. A daemon always starts from the published
snapshot, never from a local copy that one before it left: the node may have run elsewhere meanwhile.
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
    """Whether `path` lies on a network, cluster or FUSE file system, as far as the mount table tells.

    mounts: a file in the format of /proc/self/mountinfo.
    """
    real = path.resolve()
    kind, depth = "", -1
    with contextlib.suppress(OSError):
        for line in mounts.read_text(errors="surrogateescape").splitlines():
            fields, mark, source = line.partition(" - ")
            if not mark:
                continue
            point = Path(_unescaped(fields.split(" ")[4]))
            # of two at one place the later one counts
            if real.is_relative_to(point) and len(point.parts) >= depth:
                kind, depth = source.split(" ")[0], len(point.parts)
    return kind in _NETWORK or kind.startswith("fuse.")


def live_catalog(node_directory: Path) -> Path:
    """Where the catalog of this node's part of a run is written.

    In the node's directory; where that is on a network file system, below $XDG_STATE_HOME (else ~/.local/state),
    or the temporary directory if that is on the network, too. With no local disk at all it stays in place.
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
    """Let `target` be what the open catalog `db` holds now, in one step and durably.

    scratch: a local file to make the snapshot in; SQLite itself never writes to the network. Raises OSError or
    sqlite3.Error; then the snapshot before stays.
    """
    temporary = spool / "catalog.tmp"
    unlink(scratch, missing_ok=True)
    try:
        write_file(scratch, b"")  # sqlite would follow the umask
        copy = sqlite3.connect(scratch, isolation_level=None)
        try:
            db.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # readers of a snapshot make no files beside it
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
    """The catalog of one node's part of a run: `live` is written, `published` is what readers find."""

    def __init__(self, node_directory: Path, name: str = CATALOG_NAME) -> None:
        self.published = node_directory / name
        self.live = live_catalog(node_directory).with_name(name)
        self._spool = node_directory / "spool"

    @property
    def is_apart(self) -> bool:
        """Whether the live catalog lies on local disk and snapshots are published."""
        return self.live != self.published

    def fetch(self) -> None:
        """Begin with what is published: the local copy becomes the snapshot, or goes if there is none."""
        if not self.is_apart:
            return
        self.discard()
        if self.published.is_file():
            write_file(self.live, b"")
            with self.published.open("rb") as source, self.live.open("r+b") as sink:
                shutil.copyfileobj(source, sink, _COPY_NBYTES)

    def publish(self, db: sqlite3.Connection) -> None:
        """Publish a snapshot, if the live catalog lies apart. Raises OSError or sqlite3.Error."""
        if self.is_apart:
            publish_snapshot(db, self.live.with_suffix(".snapshot"), self.published, self._spool)

    def discard(self) -> None:
        """Remove the local copy, which nobody has open."""
        if self.is_apart:
            for suffix in ("", "-wal", "-shm", "-journal"):
                unlink(self.live.with_name(self.live.name + suffix), missing_ok=True)


def _is_private(root: Path) -> bool:
    """Whether `root` is, or becomes, a directory of this user that nobody else can change."""
    make_directory(root)
    found = root.lstat()
    return (
        root.is_dir() and not root.is_symlink() and found.st_uid == os.getuid() and not found.st_mode & 0o022
    )


def _unescaped(field: str) -> str:
    """A path of the mount table, where blanks, tabs, newlines and backslashes are octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
