"""The Zarr hierarchy around the shards: group and array metadata, claimed once and published in order.

    <run_id>.zarr/zarr.json                                     attributes: capd format version, run id
    <quant_type>/rank<r>/layer<l>/<phase>/<series>/zarr.json    attributes: key, dtype, encoding, record columns
    …/<series>/data/zarr.json, data/c/…                         array [record, *shape], sealed shards only
    .capd/node=<node>/                                          catalog, spool/*.partial, small-*.log

A series directory is built aside and renamed into place, so that of two writers exactly one gets a name.
zarr-python writes the array metadata (once per geometry; later arrays differ only in `shape`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from capd.errors import NotAStore, StoreError
from capd.store import names
from capd.store.codecs import chain_for
from capd.store.columns import TABLE_ROWS, Columns
from capd.store.dtypes import stored_type
from capd.store.failpoints import failpoint
from capd.store.files import (
    link,
    make_directory,
    remove_tree,
    rename,
    replace_files,
    sync_paths,
    unlink,
    write_file,
)
from capd.store.frames import FORMAT_VERSION, SeriesHeader
from capd.store.geometry import Geometry
from capd_client.key import Key

__all__ = ["Layout", "node_directory", "read_group", "run_attributes", "shard_path"]

_MAX_VARIANTS = 10_000
_SHAPE_HERE = "shape of the array"


def node_directory(run: Path, node: str) -> Path:
    """Where one node keeps its catalog and spool."""
    return run / ".capd" / f"node={node}"


def shard_path(run: Path, header: SeriesHeader, shard: int) -> Path:
    """File of shard `shard` of a series (default chunk keys, "/" separated)."""
    return run.joinpath(header.path, "data", "c", str(shard), *["0"] * len(header.geometry.extents))


def run_attributes(run: Path) -> dict[str, Any]:
    """The `capd` attributes of a run; raises NotAStore for anything that is not a run this version can read."""
    document = read_group(run)
    if document is None:
        raise NotAStore(f"{run} is not a capd run: it has no zarr.json")
    everything = document.get("attributes")
    attributes = everything.get("capd") if isinstance(everything, dict) else None
    if not isinstance(attributes, dict) or "format" not in attributes:
        raise NotAStore(f"{run} is a Zarr hierarchy, but not one that capd wrote")
    version = attributes["format"]
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise NotAStore(f"{run} has format {version!r}, this capd reads up to {FORMAT_VERSION}; upgrade capd")
    return attributes


def read_group(path: Path) -> dict[str, Any] | None:
    """The parsed zarr.json of a group, or None where there is none. Raises NotAStore if it is no JSON object."""
    try:
        document = json.loads((path / "zarr.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise NotAStore(f"{path / 'zarr.json'} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise NotAStore(f"{path / 'zarr.json'} is not a Zarr document")
    return document


class Layout:
    """Creates and updates the metadata of one run on behalf of one node; owned by the append thread."""

    def __init__(self, run: Path, run_id: str, node: str) -> None:
        self.run = run
        self.node = node
        self.spool = node_directory(run, node) / "spool"
        self.dirty: set[Path] = set()  # directories with entries that were not synced yet
        if run.exists() and not run.is_dir():
            raise NotAStore(f"{run} is a file, not a run directory")
        if run.exists() and any(entry.name != ".capd" for entry in run.iterdir()):
            run_attributes(run)  # nothing is written into a directory that is somebody else's
        self._mkdir(self.spool)
        self.dirty |= {run.parent, *self._down_to(self.spool)}  # another life may have made them
        root = run / "zarr.json"
        if not root.exists():
            self._ensure_document(root, _group({"capd": {"format": FORMAT_VERSION, "run_id": run_id}}))
            self.sync()
        run_attributes(run)
        self._groups = {run}
        self.sync()

    def _mkdir(self, path: Path) -> None:
        self.dirty.update(make_directory(path))

    def _down_to(self, directory: Path) -> set[Path]:
        """`directory`, the run, and what lies between."""
        return {self.run / parent for parent in (directory.relative_to(self.run) / "_").parents}

    def placed(self, shard: Path) -> None:
        """A shard bears its final name: nothing is published before that is durable."""
        self.dirty |= self._down_to(shard.parent)

    def _ensure_document(self, path: Path, payload: bytes) -> None:
        """Create `path` with `payload` unless a document stands there; one that power loss emptied is replaced."""
        with contextlib.suppress(NotAStore):
            if read_group(path.parent) is not None:
                return
        temporary = self.spool / "group.tmp"
        write_file(temporary, payload)
        if path.exists():
            rename(temporary, path)
        else:
            with contextlib.suppress(FileExistsError):  # another node was faster; its document says the same
                link(temporary, path)
            unlink(temporary)
        self.dirty.add(path)

    def sync(self) -> None:
        """Make all new directory entries durable."""
        sync_paths(self.dirty, self.run)
        self.dirty.clear()

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
        if holder.get("node", self.node) != self.node or (self.run / header.path / "data" / "c").exists():
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
            self._ensure_document(group / "zarr.json", _group({}))
            self.dirty |= {group.parent, group, group / "zarr.json"}  # another life may have made them
            self._groups.add(group)

    def _build(self, header: SeriesHeader) -> bool:
        target = self.run / header.path
        if target.exists():
            return False
        aside = self.spool / f"{names.key_hash(header.key)}.new"
        remove_tree(aside)
        make_directory(aside / "data")
        write_file(aside / "data" / "zarr.json", self._array_document(header, (0, *header.geometry.extents)))
        write_file(aside / "zarr.json", self._series_document(header, Columns()))
        failpoint("claim.before_rename")
        try:
            rename(aside, target)
        except OSError:  # somebody else's series stands there now
            remove_tree(aside)
            return False
        failpoint("claim.after_rename")
        self.dirty |= {
            target.parent,
            target,
            target / "data",
            target / "zarr.json",
            target / "data" / "zarr.json",
        }
        return True

    def restore(self, header: SeriesHeader) -> None:
        """Write the documents of a series of which nothing is sealed anew, durably."""
        place = self.run / header.path
        self._mkdir(place / "data")
        self._replace(
            {
                place / "zarr.json": self._series_document(header, Columns()),
                place / "data" / "zarr.json": self._array_document(header, (0, *header.geometry.extents)),
            }
        )

    def table_length(self, header: SeriesHeader) -> int:
        """Rows that the `moments` array of a series holds; 0 where there is none, or none to go on with."""
        try:
            document = json.loads((self.run / header.path / "moments" / "zarr.json").read_bytes())
            return int(document["shape"][0])
        except (FileNotFoundError, ValueError, LookupError, TypeError):
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
                for name, payload in _table_files(columns).items():
                    path = place / "moments" / name
                    self._mkdir(path.parent)
                    (lengths if path.name == "zarr.json" else chunks)[path] = payload
            documents[place / "zarr.json"] = self._series_document(header, columns)
            documents[place / "data" / "zarr.json"] = self._array_document(header, shape)
        self._replace(chunks)
        self._replace(lengths)
        failpoint("seal.after_tables")
        self._replace(documents)

    def _replace(self, documents: dict[Path, bytes]) -> None:
        if not documents:
            return
        replace_files(documents, self.spool)
        self.dirty.update(path.parent for path in documents)
        self.sync()

    def _series_document(self, header: SeriesHeader, columns: Columns) -> bytes:
        capd = {
            "key": msgspec.to_builtins(header.key),
            "dtype": header.dtype,
            "encoding": stored_type(header.dtype).encoding,
            "node": self.node,
            "attributes": header.attributes,
            "records": columns.published(),
        }
        return _group({"capd": capd})

    def _array_document(self, header: SeriesHeader, shape: tuple[int, ...]) -> bytes:
        before, behind = _array_template(header.codec, header.dtype, header.geometry)
        return f"{before}{json.dumps(shape)}{behind}".encode()


def _group(attributes: dict[str, Any]) -> bytes:
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}).encode()


@cache
def _array_template(codec: str, dtype: str, geometry: Geometry) -> tuple[str, str]:
    """zarr.json of an array before and behind its shape."""
    import zarr
    from zarr.storage import MemoryStore

    store = MemoryStore()
    stored = stored_type(dtype).stored
    batches = (geometry.batch, *geometry.chunk)
    zarr.create_array(
        store,
        shape=(0, *geometry.extents),
        dtype=stored,
        chunks=batches,
        shards=(geometry.shard_records, *geometry.extents),
        compressors=chain_for(codec, dtype).zarr_codecs(),
        filters=(),
        fill_value=0,
        dimension_names=("record", *(f"dim_{axis}" for axis in range(len(geometry.extents)))),
    )
    document = json.loads(_bytes_of(store, "zarr.json"))
    before, behind = json.dumps(document | {"shape": _SHAPE_HERE}, indent=2).split(json.dumps(_SHAPE_HERE))
    return before, behind


def _table_files(columns: Columns) -> dict[str, bytes]:
    """zarr.json of the `moments` array, and its chunks from that of the first row at hand on."""
    import zarr
    from zarr.codecs import Crc32cCodec, ZstdCodec
    from zarr.storage import MemoryStore

    names_, table = columns.table()
    store = MemoryStore()
    array = zarr.create_array(
        store,
        shape=(len(columns), table.shape[1]),
        chunks=(TABLE_ROWS, table.shape[1]),
        dtype="int64",
        compressors=[ZstdCodec(level=1), Crc32cCodec()],
        fill_value=-1,
        attributes={"columns": names_},
        dimension_names=("moment", "column"),
    )
    array[columns.first :] = table
    chunks = range(columns.first // TABLE_ROWS, (len(columns) - 1) // TABLE_ROWS + 1)
    return {name: _bytes_of(store, name) for name in ("zarr.json", *(f"c/{chunk}/0" for chunk in chunks))}


def _bytes_of(store: Any, name: str) -> bytes:
    from zarr.core.buffer import default_buffer_prototype

    return bytes(asyncio.run(store.get(name, default_buffer_prototype())).to_bytes())
