"""The content of a run's zarr.json documents: how they are written, and how they are read with checks.

zarr-python writes the array metadata once per geometry. Later arrays differ only in `shape`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from capd.errors import NotAStore
from capd.store.documents.json_document import read_document
from capd.store.documents.tombstone import check_present
from capd.store.format.codecs import chain_for
from capd.store.format.columns import TABLE_ROWS, Columns
from capd.store.format.dtypes import stored_type
from capd.store.format.frames import FORMAT_VERSION, SeriesHeader
from capd.store.format.geometry import Geometry
from capd_client.protocol.key import Moment

__all__ = [
    "array_differences",
    "array_document",
    "group_document",
    "read_group",
    "run_attributes",
    "run_ids",
    "series_document",
    "table_document",
    "table_files",
]

_SHAPE_HERE = "shape of the array"
_MAY_BE_ABSENT = frozenset({"attributes", "storage_transformers"})


def run_attributes(run: Path, *, removed: bool = False) -> dict[str, Any]:
    """Return the `capd` attributes of a run.

    Args:
        run: The directory of the run.
        removed: Whether a run that is being removed counts as a run.

    Raises:
        RemovedRun: The run was removed.
        NotAStore: The directory is not a run that this version can read.
    """
    document = read_group(run)
    if document is None:
        check_present(run)
        inside = sorted(path.name for path in run.glob("*.zarr"))
        hint = f"; it holds runs, such as {inside[-1]}: open one of them" if inside else ""
        raise NotAStore(f"{run} is not a capd run: it has no zarr.json{hint}")
    everything = document.get("attributes")
    attributes = everything.get("capd") if isinstance(everything, dict) else None
    if not isinstance(attributes, dict) or "format" not in attributes:
        raise NotAStore(f"{run} is a Zarr hierarchy, but not one that capd wrote")
    version = attributes["format"]
    if type(version) is not int or not 0 < version <= FORMAT_VERSION:
        raise NotAStore(
            f"{run} has format {version!r}, but this capd reads up to {FORMAT_VERSION}; upgrade capd"
        )
    if not isinstance(attributes.get("run_id", ""), str):
        raise NotAStore(f"{run / 'zarr.json'} does not name the run")
    if not removed:
        check_present(run, attributes)
    return attributes


def run_ids(run: Path) -> frozenset[str]:
    """Return the run ids that the files of a run may name: its own, those merged into it, and its directory's name.

    Raises:
        NotAStore: The directory is not a run that this version can read.
    """
    attributes = run_attributes(run)
    merged = attributes.get("merged_from", [])
    names = merged if isinstance(merged, list) and all(isinstance(name, str) for name in merged) else []
    return frozenset({str(attributes.get("run_id", run.stem)), run.stem, *names})


def read_group(path: Path) -> dict[str, Any] | None:
    """Return the parsed zarr.json of a group; None if there is none.

    Raises:
        NotAStore: The file is not a JSON object.
    """
    return read_document(path / "zarr.json")


def series_document(header: SeriesHeader, node: str, columns: Columns) -> bytes:
    """Return the zarr.json of a series' group."""
    stored = stored_type(header.dtype)
    capd = {
        "key": msgspec.to_builtins(header.key),
        "dtype": stored.torch,
        "encoding": stored.encoding,
        "node": node,
        "attributes": header.attributes,
        "records": columns.published(),
    }
    return group_document({"capd": capd})


def array_document(header: SeriesHeader, shape: tuple[int, ...]) -> bytes:
    """Return the zarr.json of a series' array [record, *extents] with this shape."""
    before, after = _array_template(header.codec, header.dtype, header.geometry)
    return f"{before}{json.dumps(shape)}{after}".encode()


def group_document(attributes: dict[str, Any]) -> bytes:
    """Return the zarr.json of a group."""
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}).encode()


@cache
def _array_template(codec: str, dtype: str, geometry: Geometry) -> tuple[str, str]:
    """Return the zarr.json of an array as two parts: the text before and after its shape."""
    stored = stored_type(dtype).stored
    batches = (geometry.batch, *geometry.chunk)
    files = _files_of(
        ["zarr.json"],
        shape=(0, *geometry.extents),
        dtype=stored,
        chunks=batches,
        shards=(geometry.shard_records, *geometry.extents),
        compressors=chain_for(codec, dtype).zarr_codecs(),
        filters=(),
        fill_value=0,
        dimension_names=("record", *(f"dim_{axis}" for axis in range(len(geometry.extents)))),
    )
    document = json.loads(files["zarr.json"])
    before, after = json.dumps(document | {"shape": _SHAPE_HERE}, indent=2).split(json.dumps(_SHAPE_HERE))
    return before, after


def array_differences(found: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
    """Yield the differences between an array's document and the one that the writer would write.

    Shape and attributes may differ.
    """
    for name in expected.keys() - {"shape", *_MAY_BE_ABSENT}:
        # 0, 0.0 and false are the same fill value.
        is_value = name == "fill_value"
        if found.get(name) != expected[name] if is_value else not _same(found.get(name), expected[name]):
            yield f"{name} is {json.dumps(found.get(name))}, but the shards give {json.dumps(expected[name])}"
    if not isinstance(found.get("attributes", {}), dict) or found.get("storage_transformers", []) != []:
        yield "attributes are not an object, or storage_transformers are not empty"
    if strange := found.keys() - expected.keys() - _MAY_BE_ABSENT:
        yield f"unknown members: {', '.join(sorted(strange))}"


def _same(found: Any, expected: Any) -> bool:
    """Return whether another version of zarr may write `found` for `expected`. As text, 3 differs from 3.0 and true."""
    text, wanted = (json.dumps(_shortest(value), sort_keys=True) for value in (found, expected))
    # The byte order of single bytes has no meaning.
    if '"codecs": [{"name": "bytes"}' in wanted:
        ordered = '"codecs": [{"configuration": {"endian": "little"}, "name": "bytes"}'
        text = text.replace(ordered, '"codecs": [{"name": "bytes"}')
    return text == wanted


def _shortest(value: Any) -> Any:
    """Return a member without its empty configurations."""
    if isinstance(value, dict):
        kept = {name: member for name, member in value.items() if (name, member) != ("configuration", {})}
        return {name: _shortest(member) for name, member in kept.items()}
    return [_shortest(member) for member in value] if isinstance(value, list) else value


@cache
def table_document(ndim: int) -> dict[str, Any]:
    """Return the zarr.json of a `moments` array with one row, for records with `ndim` axes."""
    one = Columns(0, [(*msgspec.structs.astuple(Moment()), (0,) * ndim)])
    document: dict[str, Any] = json.loads(table_files(one)["zarr.json"])
    return document


def table_files(columns: Columns) -> dict[str, bytes]:
    """Return the files of the `moments` array: its zarr.json, and its chunks from the first available row on."""
    from zarr.codecs import Crc32cCodec, ZstdCodec

    names_, table = columns.table()
    chunks = range(columns.first // TABLE_ROWS, (len(columns) - 1) // TABLE_ROWS + 1)
    return _files_of(
        ["zarr.json", *(f"c/{chunk}/0" for chunk in chunks)],
        table,
        columns.first,
        shape=(len(columns), table.shape[1]),
        chunks=(TABLE_ROWS, table.shape[1]),
        dtype="int64",
        compressors=[ZstdCodec(level=1), Crc32cCodec()],
        fill_value=-1,
        attributes={"columns": names_},
        dimension_names=("moment", "column"),
    )


def _files_of(names: list[str], rows: Any = None, first: int = 0, **array: Any) -> dict[str, bytes]:
    """Return these files of an array that zarr-python writes, with `rows` from row `first` on."""
    from zarr.api.asynchronous import create_array
    from zarr.core.buffer import default_buffer_prototype
    from zarr.storage import MemoryStore

    async def written() -> dict[str, bytes]:
        store = MemoryStore()
        made = await create_array(store, **array)
        if rows is not None:
            await made.setitem((slice(first, None),), rows)
        found = {name: await store.get(name, default_buffer_prototype()) for name in names}
        return {name: buffer.to_bytes() for name, buffer in found.items() if buffer is not None}

    # Not by zarr's synchronous calls: zarr gives their thread 0.2 s to end, and a busy daemon would show an error then.
    # Not in this thread: in a notebook it has a running loop.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, written()).result()
