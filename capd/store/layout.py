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
import os
import shutil
from collections.abc import Container, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from capd.errors import NotAStore, StoreError
from capd.store import names
from capd.store.codecs import chain_for
from capd.store.columns import Columns
from capd.store.dtypes import stored_type
from capd.store.files import make_directory, replace_files, sync_paths, write_file
from capd.store.frames import FORMAT_VERSION, SeriesHeader
from capd.store.geometry import Geometry

__all__ = ["Layout", "node_directory", "read_group", "run_attributes", "shard_path"]

_MAX_VARIANTS = 10_000
_TABLE_ROWS = 8192


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
    attributes = document.get("attributes", {}).get("capd")
    if not isinstance(attributes, dict) or "format" not in attributes:
        raise NotAStore(f"{run} is a Zarr hierarchy, but not one that capd wrote")
    if attributes["format"] > FORMAT_VERSION:
        raise NotAStore(
            f"{run} has format {attributes['format']}, this capd reads up to {FORMAT_VERSION}; upgrade capd"
        )
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
        self._publish_once(run / "zarr.json", _group({"capd": {"format": FORMAT_VERSION, "run_id": run_id}}))
        run_attributes(run)
        self._groups = {run}

    def _mkdir(self, path: Path) -> None:
        self.dirty.update(make_directory(path))

    def _publish_once(self, path: Path, payload: bytes) -> None:
        """Create `path` with `payload` unless it exists; complete or absent at every moment."""
        if path.exists():
            return
        temporary = self.spool / "group.tmp"
        write_file(temporary, payload)
        sync_paths([temporary], self.spool)
        with contextlib.suppress(FileExistsError):  # another node was faster; its document says the same
            os.link(temporary, path)
        temporary.unlink()

    def sync(self) -> None:
        """Make all new directory entries durable."""
        sync_paths(self.dirty, self.run)
        self.dirty.clear()

    def claim(self, header: SeriesHeader, owned: Container[str]) -> SeriesHeader:
        """Create the groups and the empty array of a new series; returns the header with the path it got.

        `header.path` is the wish. A name held by a variant of the same key leads to the next "~v" number, a
        name held by another key to "~k<hash>". `owned`: paths of the series that this node knows; a claim that it
        does not know, left by a kill before its first record, is taken again.
        """
        base = header.path
        self._ensure_groups((self.run / base).parent)
        for number in count():
            if number > _MAX_VARIANTS:
                raise StoreError(
                    f"series {base} has more than {_MAX_VARIANTS} variants; captures vary too much in shape"
                )
            path = names.variant(base, number)
            candidate = msgspec.structs.replace(header, path=path)
            if self._build(candidate):
                return candidate
            holder = (read_group(self.run / path) or {}).get("attributes", {}).get("capd", {})
            if holder.get("key") != msgspec.to_builtins(header.key):
                if "~k" not in base:
                    collided = msgspec.structs.replace(header, path=names.collided(base, header.key))
                    return self.claim(collided, owned)
            elif path not in owned and self._is_abandoned(path, holder):
                shutil.rmtree(self.run / path)
                if self._build(candidate):
                    return candidate
        raise AssertionError("unreachable")

    def _is_abandoned(self, path: str, holder: dict[str, Any]) -> bool:
        return holder.get("node") == self.node and not (self.run / path / "data" / "c").exists()

    def _ensure_groups(self, directory: Path) -> None:
        missing = []
        while directory not in self._groups:
            missing.append(directory)
            directory = directory.parent
        for group in reversed(missing):
            self._mkdir(group)
            self._publish_once(group / "zarr.json", _group({}))
            self.dirty.add(group)
            self._groups.add(group)

    def _build(self, header: SeriesHeader) -> bool:
        target = self.run / header.path
        if target.exists():
            return False
        aside = self.spool / f"{names.key_hash(header.key)}.new"
        shutil.rmtree(aside, ignore_errors=True)
        make_directory(aside / "data")
        write_file(aside / "data" / "zarr.json", self._array_document(header, (0, *header.geometry.extents)))
        write_file(aside / "zarr.json", self._series_document(header, Columns()))
        try:
            os.rename(aside, target)
        except OSError:  # somebody else's series stands there now
            shutil.rmtree(aside, ignore_errors=True)
            return False
        self.dirty |= {
            target.parent,
            target,
            target / "data",
            target / "zarr.json",
            target / "data" / "zarr.json",
        }
        return True

    def publish_columns(self, columns: Sequence[tuple[SeriesHeader, Columns]]) -> None:
        """Publish the moments and shapes of the sealed records of many series, durably."""
        for header, own in columns:
            if own.is_long:
                self.dirty.update(_write_table(self.run / header.path / "moments", own))
        self.sync()
        documents = {self.run / h.path / "zarr.json": self._series_document(h, own) for h, own in columns}
        self._replace(documents)

    def publish_shapes(self, shapes: Sequence[tuple[SeriesHeader, tuple[int, ...]]]) -> None:
        """Let plain Zarr readers see the array shapes [records, *record], durably."""
        self._replace(
            {self.run / h.path / "data" / "zarr.json": self._array_document(h, shape) for h, shape in shapes}
        )

    def _replace(self, documents: dict[Path, bytes]) -> None:
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
        template = json.loads(_array_template(header.codec, header.dtype, header.geometry))
        template["shape"] = shape
        return json.dumps(template, indent=2).encode()


def _group(attributes: dict[str, Any]) -> bytes:
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}).encode()


@cache
def _array_template(codec: str, dtype: str, geometry: Geometry) -> str:
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
    return _document_of(store)


def _write_table(path: Path, columns: Columns) -> list[Path]:
    """Append to the `moments` array; the chunk that was partly filled is written again. Returns what to sync."""
    import zarr
    from zarr.codecs import Crc32cCodec, ZstdCodec

    if (path / "zarr.json").exists():
        array = zarr.open_array(path, mode="r+")
    else:
        names_, table = columns.table(0)
        array = zarr.create_array(
            path,
            shape=(0, table.shape[1]),
            chunks=(_TABLE_ROWS, table.shape[1]),
            dtype="int64",
            compressors=[ZstdCodec(level=1), Crc32cCodec()],
            fill_value=-1,
            attributes={"columns": names_},
            dimension_names=("moment", "column"),
            overwrite=True,
        )
    first = array.shape[0] // _TABLE_ROWS * _TABLE_ROWS
    _, table = columns.table(first)
    array.resize((len(columns), table.shape[1]))
    array[first:] = table
    chunks = range(first // _TABLE_ROWS, (len(columns) - 1) // _TABLE_ROWS + 1)
    files = [path / "zarr.json", *(path / "c" / str(chunk) / "0" for chunk in chunks)]
    return [*files, *{file.parent for file in files}, path / "c"]


def _document_of(store: Any) -> str:
    from zarr.core.buffer import default_buffer_prototype

    payload = asyncio.run(store.get("zarr.json", default_buffer_prototype()))
    return str(payload.to_bytes().decode())
