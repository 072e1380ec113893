"""The Zarr hierarchy around the shards: group and array metadata, claimed once and published in order.

    <run_id>.zarr/zarr.json                                     attributes: capd format version, run id
    <quant_type>/rank<r>/layer<l>/<phase>/<series>/zarr.json    attributes: key, dtype, encoding, record columns
    …/<series>/data/zarr.json, data/c/…                         array [record, *shape], sealed shards only
    .capd/node=<node>/                                          catalog, spool/*.partial, small-*.log

A series directory is built aside and renamed into place, so that of two writers exactly one gets a name.
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
    """Where one node keeps its catalog and spool."""
    return run / ".capd" / f"node={node}"


def shard_path(run: Path, header: SeriesHeader, shard: int) -> Path:
    """File of shard `shard` of a series (default chunk keys, "/" separated)."""
    return run.joinpath(header.path, "data", "c", str(shard), *["0"] * len(header.geometry.extents))


def nodes_of(run: Path) -> list[str]:
    """Names of the nodes that wrote to a run."""
    return sorted(path.name.removeprefix("node=") for path in (run / ".capd").glob("node=*"))


def series_on_disk(run: Path) -> Iterator[str]:
    """Paths of all series directories of a run, in order."""
    for data in sorted(run.glob("*/rank*/layer*/*/*/data")):
        yield str(data.parent.relative_to(run))


def partial_path(spool: Path, series_path: str, shard: int) -> Path:
    """File of an unsealed shard."""
    return spool / f"{_digest(series_path)}-{shard:08d}.partial"


def by_digest(headers: Iterable[SeriesHeader]) -> dict[str, SeriesHeader]:
    """Series by what the names of their unsealed shards begin with."""
    return {_digest(header.path): header for header in headers}


def named(path: Path, digests: Mapping[str, SeriesHeader]) -> tuple[SeriesHeader, int] | None:
    """Series and number of an unsealed shard by its name, None if the series is not among `digests`."""
    digest, _, number = path.stem.partition("-")
    return (digests[digest], int(number)) if digest in digests and number.isdecimal() else None


def _digest(series_path: str) -> str:
    return hashlib.blake2b(series_path.encode(), digest_size=10).hexdigest()


def has_shards(series: Path) -> bool:
    """Whether anything is sealed in the directory of a series; those of a shard are made when it is begun."""
    return any(path.is_file() for path in (series / "data" / "c").rglob("*"))


class Layout:
    """Creates and updates the metadata of one run on behalf of one node; owned by the append thread."""

    def __init__(self, run: Path, run_id: str, node: str) -> None:
        self.run = run
        self.node = node
        self.spool = node_directory(run, node) / "spool"
        self.dirty: set[Path] = set()  # directories with entries, and documents, that were not synced yet
        self._unsynced: dict[Path, Callable[[], bytes]] = {}  # new documents, and what they hold
        self._doubtful = False  # whether a sync of those failed
        if run.exists() and not run.is_dir():
            raise NotAStore(f"{run} is a file, not a run directory")
        if run.exists() and any(entry.name != ".capd" for entry in run.iterdir()):
            run_attributes(run)  # nothing is written into a directory that is somebody else's
        self._mkdir(self.spool)
        self.dirty |= {run.parent, *self._down_to(self.spool)}  # another life may have made them
        root = run / "zarr.json"
        if not root.exists():
            attributes: dict[str, Any] = {"capd": {"format": FORMAT_VERSION, "run_id": run_id}}
            self._ensure_document(root, group_document(attributes), durable=True)
        run_attributes(run)
        self._groups = {run}
        self.sync()

    def _mkdir(self, path: Path) -> None:
        self.dirty.update(make_directory(path))

    def _down_to(self, directory: Path) -> set[Path]:
        """`directory`, the run, and what lies between."""
        found = {directory}
        while directory != self.run:
            directory = directory.parent
            found.add(directory)
        return found

    def make_room(self, header: SeriesHeader, shard: int) -> None:
        """Make the directories of a shard that is begun: at a shutdown thousands of shards may need theirs at once."""
        if (self.run / header.path / "data").is_dir():  # a store that was removed stays removed
            self._mkdir(shard_path(self.run, header, shard).parent)

    def placed(self, shard: Path) -> None:
        """A shard bears its final name: nothing is published before that is durable."""
        self.dirty |= self._down_to(shard.parent)

    def _ensure_document(self, path: Path, payload: bytes, *, durable: bool = False) -> None:
        """Create `path` with `payload` unless a document stands there; one that power loss emptied is replaced."""
        with contextlib.suppress(NotAStore):
            if read_group(path.parent) is not None:
                self._new_document(path, partial(bytes, path.read_bytes()))  # another life may have made it
                return
        temporary = self.spool / "group.tmp"
        write_file(temporary, payload)
        if durable:  # before it has a name: who tries again after an error finds nothing to trust
            sync_paths([temporary], self.run)
        if path.exists():
            rename(temporary, path)
        else:
            with contextlib.suppress(FileExistsError):  # another node was faster; its document says the same
                link(temporary, path)
            unlink(temporary)
        self._new_document(path, partial(bytes, payload))

    def _new_document(self, path: Path, make: Callable[[], bytes]) -> None:
        self.dirty.add(path)
        self._unsynced[path] = make

    def sync(self) -> None:
        """Make all new documents and directory entries durable. Raises OSError.

        The kernel may have given up then what the documents hold: the next call writes them anew.
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
        """Create the groups and the empty array of a new series; returns the header with the path it got.

        `header.path` is the wish. A name held by a variant of the same key leads to the next "~v" number, a
        name held by another key to "~k<hash>". owned: the key of this node's series at a path, on disk or not; a
        claim that it does not know, left by a kill before its first record, is taken again.
        """
        base = header.path
        self.ensure_groups((self.run / base).parent)
        for number in count():
            if number > _MAX_VARIANTS:
                raise StoreError(
                    f"series {base} has more than {_MAX_VARIANTS} variants; captures vary too much in shape"
                )
            path = names.variant(base, number)
            candidate = msgspec.structs.replace(header, path=path)
            known = owned(path)
            if known is None and (self._build(candidate) or self._build_again(candidate)):
                return candidate
            holder = msgspec.to_builtins(known) if known else self._holder(path).get("key")
            if holder not in (None, msgspec.to_builtins(header.key)) and "~k" not in base:
                collided = msgspec.structs.replace(header, path=names.collided(base, header.key))
                return self.claim(collided, owned)
        raise AssertionError("unreachable")

    def _build_again(self, header: SeriesHeader) -> bool:
        """Take a claim of this key again that was given up before its first record."""
        holder = self._holder(header.path)
        if holder and holder.get("key") != msgspec.to_builtins(header.key):
            return False
        if holder.get("node", self.node) != self.node or has_shards(self.run / header.path):
            return False
        remove_tree(self.run / header.path)
        return self._build(header)

    def _holder(self, path: str) -> dict[str, Any]:
        """What the group at `path` says of its series; empty where that cannot be read."""
        try:
            found = (read_group(self.run / path) or {}).get("attributes", {}).get("capd", {})
        except NotAStore:
            return {}
        return found if isinstance(found, dict) else {}

    def ensure_groups(self, directory: Path) -> None:
        """Create the groups from the run down to `directory` where they are missing."""
        missing = []
        while directory not in self._groups:
            missing.append(directory)
            directory = directory.parent
        for group in reversed(missing):
            self._mkdir(group)
            self._ensure_document(group / "zarr.json", group_document({}))
            self.dirty |= {group.parent, group}  # another life may have made them
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
            if error.errno in _OCCUPIED:  # somebody else's series stands there now
                return False
            raise  # under another name it would fail as well
        failpoint("claim.after_rename")
        self.dirty |= {target.parent, target, target / "data"}
        for name, make in documents.items():
            self._new_document(target / name, make)
        return True

    def _empty_documents(self, header: SeriesHeader) -> dict[str, Callable[[], bytes]]:
        """The documents of a series without sealed records."""
        return {
            "data/zarr.json": partial(array_document, header, (0, *header.geometry.extents)),
            "zarr.json": partial(series_document, header, self.node, Columns()),
        }

    def restore(self, header: SeriesHeader) -> None:
        """Write the documents of a series of which nothing is sealed anew, durably."""
        place = self.run / header.path
        self._mkdir(place / "data")
        self._replace({place / name: make() for name, make in self._empty_documents(header).items()})

    def table_length(self, header: SeriesHeader) -> int:
        """Rows that the `moments` array of a series holds; 0 where there is none, or none to go on with."""
        with contextlib.suppress(NotAStore, LookupError, TypeError):
            document = read_document(self.run / header.path / "moments" / "zarr.json")
            if document is not None and is_length(document["shape"][0]):
                return int(document["shape"][0])
        return 0

    def publish(self, series: Sequence[tuple[SeriesHeader, Columns, tuple[int, ...]]]) -> None:
        """Let plain Zarr readers see the sealed records of many series, durably: moments, then array shapes.

        Readers use the smaller of both counts, so the two documents of a series need one sync; only the chunks
        and the length of a `moments` array must be on disk before a document says that they are.
        """
        chunks: dict[Path, bytes] = {}
        lengths: dict[Path, bytes] = {}
        documents: dict[Path, bytes] = {}
        for header, columns, shape in series:
            place = self.run / header.path
            self._mkdir(place / "data")  # power loss may have taken it
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
