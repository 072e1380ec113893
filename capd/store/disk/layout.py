"""The Zarr hierarchy around the shards: group and array metadata, claimed once and published in order.

    <run_id>.zarr/zarr.json                                     attributes: capd format version, run id
    <quant_type>/rank<r>/layer<l>/<phase>/<series>/zarr.json    attributes: key, dtype, encoding, record columns
    …/<series>/data/zarr.json, data/c/…                         array [record, *shape], sealed shards only
    .capd/lock                                                  held by writers and removals
    .capd/node=<node>/                                          catalog, spool/*.partial, small-*.log

A series directory is built in the spool and renamed to its final path. If two writers want the same name, exactly one
of them gets it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from capd.errors import NotAStore, StoreError
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import (
    link,
    make_directory,
    remove_tree,
    rename,
    replace_files,
    sync_paths,
    unlink,
    write_file,
)
from capd.store.disk.run_lock import RunLock
from capd.store.documents import names
from capd.store.documents.json_document import is_length, read_document
from capd.store.documents.zarr_json import (
    array_document,
    group_document,
    read_group,
    run_attributes,
    series_document,
    table_files,
)
from capd.store.format.columns import Columns
from capd.store.format.frames import FORMAT_VERSION, SeriesHeader
from capd_client.protocol.key import Key

__all__ = [
    "PARTIAL_GLOB", "Layout", "by_digest", "has_shards", "named", "node_directory", "nodes_of", "partial_path",
    "series_on_disk", "shard_path",
]  # fmt: skip

PARTIAL_GLOB = "*.partial"
_MAX_VARIANTS = 10_000
_OCCUPIED = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})


def node_directory(run: Path, node: str) -> Path:
    """Return the directory of one node's catalog and spool."""
    return run / ".capd" / f"node={node}"


def shard_path(run: Path, header: SeriesHeader, shard: int) -> Path:
    """Return the file of shard `shard` of a series (default chunk keys, "/" separated)."""
    return run.joinpath(header.path, "data", "c", str(shard), *["0"] * len(header.geometry.extents))


def nodes_of(run: Path) -> list[str]:
    """Return the names of the nodes that wrote to a run."""
    return sorted(path.name.removeprefix("node=") for path in (run / ".capd").glob("node=*"))


def series_on_disk(run: Path) -> Iterator[str]:
    """Yield the paths of all series directories of a run, in order."""
    for data in sorted(run.glob("*/rank*/layer*/*/*/data")):
        yield str(data.parent.relative_to(run))


def partial_path(spool: Path, series_path: str, shard: int) -> Path:
    """Return the file of an unsealed shard."""
    return spool / f"{_digest(series_path)}-{shard:08d}.partial"


def by_digest(headers: Iterable[SeriesHeader]) -> dict[str, SeriesHeader]:
    """Return the series by the digest that begins the file names of their unsealed shards."""
    return {_digest(header.path): header for header in headers}


def named(path: Path, digests: Mapping[str, SeriesHeader]) -> tuple[SeriesHeader, int] | None:
    """Return series and number of an unsealed shard from its file name; None if the series is not in `digests`."""
    digest, _, number = path.stem.partition("-")
    return (digests[digest], int(number)) if digest in digests and number.isdecimal() else None


def _digest(series_path: str) -> str:
    return hashlib.blake2b(series_path.encode(), digest_size=10).hexdigest()


def has_shards(series: Path) -> bool:
    """Return whether a series directory contains a sealed shard.

    Directories alone are no evidence, because they are created when a shard is begun.
    """
    return any(path.is_file() for path in (series / "data" / "c").rglob("*"))


class Layout:
    """The metadata of one run, created and updated on behalf of one node; owned by the append thread.

    Attributes:
        run: The directory of the run.
        node: The name of the node.
        spool: The node's spool directory.
        dirty: Documents, and directories with entries, that are not synced yet.
    """

    def __init__(self, run: Path, run_id: str, node: str) -> None:
        """Open the run, or create its directories and its root document.

        Raises:
            NotAStore: The path is a file, or the directory is not a run.
            OSError: The run cannot be created or synced.
        """
        self.run = run
        self.node = node
        self.spool = node_directory(run, node) / "spool"
        self.dirty: set[Path] = set()
        # New documents, and the functions that return their content.
        self._unsynced: dict[Path, Callable[[], bytes]] = {}
        # Whether a sync of the new documents failed.
        self._doubtful = False
        if run.exists() and not run.is_dir():
            raise NotAStore(f"{run} is a file, not a run directory")
        if run.exists() and any(entry.name != ".capd" for entry in run.iterdir()):
            # Nothing is written into a directory that is not a run.
            run_attributes(run)
        # A run is not removed while it has a writer.
        self._lock = RunLock.shared(run)
        try:
            self._begin(run_id)
        except BaseException:
            self.close()
            raise

    def _begin(self, run_id: str) -> None:
        """Create the directories and the root document, or check them."""
        run = self.run
        self._mkdir(self.spool)
        # A killed writer may have created these directories without a sync.
        self.dirty |= {run.parent, *self._down_to(self.spool)}
        root = run / "zarr.json"
        if not root.exists():
            attributes: dict[str, Any] = {"capd": {"format": FORMAT_VERSION, "run_id": run_id}}
            self._ensure_document(root, group_document(attributes), durable=True)
        run_attributes(run)
        self._groups = {run}
        self.sync()

    def close(self) -> None:
        """Let the run go: it may be removed from now on. Idempotent."""
        self._lock.release()

    def _mkdir(self, path: Path) -> None:
        self.dirty.update(make_directory(path))

    def _down_to(self, directory: Path) -> set[Path]:
        """Return `directory`, the run, and the directories between them."""
        found = {directory}
        while directory != self.run:
            directory = directory.parent
            found.add(directory)
        return found

    def make_room(self, header: SeriesHeader, shard: int) -> None:
        """Create the directories of a shard when it is begun.

        A shutdown seals thousands of shards at once, which may all need their directories.
        """
        # A store that was removed is not created again.
        if (self.run / header.path / "data").is_dir():
            self._mkdir(shard_path(self.run, header, shard).parent)

    def placed(self, shard: Path) -> None:
        """Note that a shard has its final name. The name must be durable before the shard is published."""
        self.dirty |= self._down_to(shard.parent)

    def _ensure_document(self, path: Path, payload: bytes, *, durable: bool = False) -> None:
        """Create `path` with `payload` unless a document exists. A document that a power loss emptied is replaced."""
        with contextlib.suppress(NotAStore):
            if read_group(path.parent) is not None:
                # A killed writer may have created this document without a sync.
                self._new_document(path, partial(bytes, path.read_bytes()))
                return
        temporary = self.spool / "group.tmp"
        write_file(temporary, payload)
        # The sync precedes the name. After a failed sync, a retry must not find a document and trust it.
        if durable:
            sync_paths([temporary], self.run)
        if path.exists():
            rename(temporary, path)
        else:
            # If another node was faster, its document is the same.
            with contextlib.suppress(FileExistsError):
                link(temporary, path)
            unlink(temporary)
        self._new_document(path, partial(bytes, payload))

    def _new_document(self, path: Path, make: Callable[[], bytes]) -> None:
        self.dirty.add(path)
        self._unsynced[path] = make

    def sync(self) -> None:
        """Make all new documents and directory entries durable. Raises OSError.

        After a failure the kernel may have lost the content of the documents. The next call therefore writes them
        again.
        """
        if self._doubtful:
            documents = {path: make() for path, make in self._unsynced.items() if path.parent.is_dir()}
            replace_files(documents, self.spool)
            self.dirty.update(path.parent for path in documents)
        try:
            sync_paths(self.dirty, self.run)
        except OSError:
            self._doubtful = True
            raise
        self.dirty.clear()
        self._unsynced.clear()
        self._doubtful = False

    def claim(self, header: SeriesHeader, owned: Callable[[str], Key | None]) -> SeriesHeader:
        """Create the groups and the empty array of a new series. Return the header with its final path.

        `header.path` is the desired path. If a variant of the same key has it, the next "~v" number is tried. If
        another key has it, "~k<hash>" is appended. A claim that a killed writer left before its first record is reused.

        Args:
            header: The new series.
            owned: Returns the key of this node's series at a path, on disk or not; None for an unknown path.

        Raises:
            StoreError: The series has too many variants.
            OSError: The series cannot be created.
        """
        base = header.path
        self.ensure_groups((self.run / base).parent)
        for number in count():
            if number > _MAX_VARIANTS:
                raise StoreError(
                    f"series {base} has more than {_MAX_VARIANTS} variants; the shapes of its captures vary too much"
                )
            path = names.variant(base, number)
            candidate = msgspec.structs.replace(header, path=path)
            known = owned(path)
            if known is None and (self._build(candidate) or self._build_again(candidate)):
                return candidate
            holder = msgspec.to_builtins(known) if known else self.holder(path).get("key")
            if holder not in (None, msgspec.to_builtins(header.key)) and "~k" not in base:
                collided = msgspec.structs.replace(header, path=names.collided(base, header.key))
                return self.claim(collided, owned)
        raise AssertionError("unreachable")

    def _build_again(self, header: SeriesHeader) -> bool:
        """Reuse a claim of this key that was abandoned before its first record."""
        holder = self.holder(header.path)
        if holder and holder.get("key") != msgspec.to_builtins(header.key):
            return False
        if holder.get("node", self.node) != self.node or has_shards(self.run / header.path):
            return False
        remove_tree(self.run / header.path)
        return self._build(header)

    def holder(self, path: str) -> dict[str, Any]:
        """Return the attributes of the series at `path`; empty if they cannot be read."""
        try:
            found = (read_group(self.run / path) or {}).get("attributes", {}).get("capd", {})
        except (NotAStore, AttributeError):
            return {}
        return found if isinstance(found, dict) else {}

    def ensure_groups(self, directory: Path) -> None:
        """Create the missing groups from the run down to `directory`."""
        missing = []
        while directory not in self._groups:
            missing.append(directory)
            directory = directory.parent
        for group in reversed(missing):
            self._mkdir(group)
            self._ensure_document(group / "zarr.json", group_document({}))
            # A killed writer may have created these directories without a sync.
            self.dirty |= {group.parent, group}
            self._groups.add(group)

    def _build(self, header: SeriesHeader) -> bool:
        target = self.run / header.path
        if target.exists():
            return False
        aside = self.spool / f"{names.key_hash(header.key)}.new"
        remove_tree(aside)
        make_directory(aside / "data")
        documents = self._empty_documents(header)
        for name, make in documents.items():
            write_file(aside / name, make())
        failpoint("claim.before_rename")
        try:
            rename(aside, target)
        except OSError as error:
            remove_tree(aside)
            # Another writer created a series at this path in the meantime.
            if error.errno in _OCCUPIED:
                return False
            # The same error would occur at any other path.
            raise
        failpoint("claim.after_rename")
        self.dirty |= {target.parent, target, target / "data"}
        for name, make in documents.items():
            self._new_document(target / name, make)
        return True

    def _empty_documents(self, header: SeriesHeader) -> dict[str, Callable[[], bytes]]:
        """Return the documents of a series without sealed records: name → function that returns the content."""
        return {
            "data/zarr.json": partial(array_document, header, (0, *header.geometry.extents)),
            "zarr.json": partial(series_document, header, self.node, Columns()),
        }

    def restore(self, header: SeriesHeader) -> None:
        """Write the documents of a series without sealed records again, durably."""
        place = self.run / header.path
        self._mkdir(place / "data")
        self._replace({place / name: make() for name, make in self._empty_documents(header).items()})

    def table_length(self, header: SeriesHeader) -> int:
        """Return the number of rows in a series' `moments` array; 0 if there is none that can be continued."""
        with contextlib.suppress(NotAStore, LookupError, TypeError):
            document = read_document(self.run / header.path / "moments" / "zarr.json")
            if document is not None and is_length(document["shape"][0]):
                return int(document["shape"][0])
        return 0

    def publish(self, series: Sequence[tuple[SeriesHeader, Columns, tuple[int, ...]]]) -> None:
        """Make the sealed records of many series visible to plain Zarr readers, durably: moments, then array shapes.

        Readers use the smaller of both counts, so the two documents of a series need only one sync. The chunks and the
        length of a `moments` array must be on disk before a document refers to them.

        Args:
            series: The header, the columns and the array's new shape of each series.
        """
        chunks: dict[Path, bytes] = {}
        lengths: dict[Path, bytes] = {}
        documents: dict[Path, bytes] = {}
        for header, columns, shape in series:
            place = self.run / header.path
            # A power loss may have removed the directory.
            self._mkdir(place / "data")
            if columns.is_long:
                for name, payload in table_files(columns).items():
                    path = place / "moments" / name
                    self._mkdir(path.parent)
                    (lengths if path.name == "zarr.json" else chunks)[path] = payload
            documents[place / "zarr.json"] = series_document(header, self.node, columns)
            documents[place / "data" / "zarr.json"] = array_document(header, shape)
        self._replace(chunks)
        self._replace(lengths)
        failpoint("seal.after_tables")
        self._replace(documents)

    def _replace(self, documents: dict[Path, bytes]) -> None:
        if not documents:
            return
        replace_files(documents, self.spool)
        self.dirty.update(path.parent for path in documents)
        for path in documents:
            self._unsynced.pop(path, None)
        self.sync()
