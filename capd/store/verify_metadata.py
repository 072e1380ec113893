"""Checks a series' metadata, and its catalog rows, against what its shards say."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec

from capd.store.catalog_check import Sums
from capd.store.catalog_read import SeriesRow
from capd.store.codecs import chain_for
from capd.store.dtypes import stored_type
from capd.store.frames import RecordRow, SeriesHeader, StatsRow

__all__ = ["array_problems", "group_problems", "row_differences", "total_problems"]

_ROW_FIELDS = tuple(name for name in RecordRow.__struct_fields__ if name != "stats")
_OTHER_MEMBERS = frozenset({"shape", "codecs", "attributes", "storage_transformers"})


def group_problems(document: dict[str, Any], header: SeriesHeader, node: str) -> Iterator[str]:
    """How a series group's metadata contradicts its header."""
    capd = document["attributes"]["capd"]
    stored = stored_type(header.dtype)
    expected = {
        "key": msgspec.to_builtins(header.key),
        "dtype": stored.torch,
        "encoding": stored.encoding,
        "node": node,
        "attributes": msgspec.to_builtins(header.attributes),
    }
    if (document.get("zarr_format"), document.get("node_type")) != (3, "group"):
        yield "is not the metadata of a Zarr group"
    for name, value in expected.items():
        if capd.get(name) != value:
            yield f"{name} is {capd.get(name)!r}, the shards say {value!r}"


def array_problems(document: dict[str, Any], header: SeriesHeader) -> Iterator[str]:
    """How an array's metadata contradicts its header: data type, chunk grid, codecs, fill value, chunk keys."""
    geometry = header.geometry
    grid = [geometry.shard_records, *geometry.extents]
    expected: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "array",
        "data_type": stored_type(header.dtype).stored.name,
        "fill_value": False if header.dtype == "bool" else 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": grid}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "dimension_names": ["record", *(f"dim_{axis}" for axis in range(len(geometry.extents)))],
    }
    for name, value in expected.items():
        found = document.get(name)
        if found != value if name == "fill_value" else _text(found) != _text(value):
            yield f"{name} is {json.dumps(found)}, the shards say {json.dumps(value)}"
    if document.get("storage_transformers", []) != [] or not isinstance(document.get("attributes", {}), dict):
        yield "attributes or storage_transformers are not those of an array without any"
    strange = document.keys() - expected.keys() - _OTHER_MEMBERS
    if strange:
        yield f"unknown members {', '.join(sorted(strange))}"
    shape = document["shape"]
    if len(shape) != len(grid) or any(n > e for n, e in zip(shape[1:], grid[1:], strict=False)):
        yield f"shape is {shape}, the shards hold records of up to {list(grid[1:])}"
    yield from _codec_problems(document, header)


def _codec_problems(document: dict[str, Any], header: SeriesHeader) -> Iterator[str]:
    geometry = header.geometry
    try:
        [(sharding, inner)] = _codecs(document["codecs"])
        (first, order), *chain = _codecs(inner["codecs"])
        (index_first, index_order), *index_chain = _codecs(inner["index_codecs"])
        chunk, location, members = inner["chunk_shape"], inner["index_location"], len(inner)
    except (LookupError, TypeError, ValueError):
        yield "codecs are not those of a sharded array"
        return
    codecs = _codecs([codec.to_dict() for codec in chain_for(header.codec, header.dtype).zarr_codecs()])
    expected = ("sharding_indexed", [geometry.batch, *geometry.chunk], codecs)
    if _text((sharding, chunk, chain)) != _text(expected):
        yield f"codecs are {json.dumps(document['codecs'])}, which is not what the shards say"
    single = stored_type(header.dtype).stored.itemsize == 1
    little = (("bytes", {"endian": "little"}), *((("bytes", {}),) if single else ()))
    plain = (index_first, index_order, index_chain) == ("bytes", {"endian": "little"}, [("crc32c", {})])
    if (first, order) not in little or not plain or location != "end" or members != 4:
        yield "codecs do not store elements and index as little-endian bytes with a checksum behind the chunks"


def _text(value: Any) -> str:
    """JSON tells 3 from 3.0 and true, which Python's equality does not."""
    return json.dumps(value, sort_keys=True)


def _codecs(documents: Any) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for document in json.loads(json.dumps(documents, default=str)):
        if not isinstance(document, dict) or document.keys() - {"name", "configuration"}:
            raise ValueError("no codec, or unknown members")
        found.append((document["name"], document.get("configuration") or {}))
    return found


def row_differences(commit: RecordRow, row: RecordRow) -> list[str]:
    """Names of the fields in which a catalog row differs from its COMMIT."""
    found = [name for name in _ROW_FIELDS if getattr(commit, name) != getattr(row, name)]
    if commit.stats is None or row.stats is None:
        return found if commit.stats is row.stats else [*found, "stats"]
    return found + [
        name
        for name in StatsRow.__struct_fields__
        if not _equal(getattr(commit.stats, name), getattr(row.stats, name))
    ]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def total_problems(row: SeriesRow, sums: Sums | None) -> Iterator[str]:
    """How the totals of a series in the catalog contradict its record rows."""
    if sums is None:
        sums = Sums()
    if (row.records, row.records - 1) != (sums.records, sums.last):
        yield f"{row.records} records in the series' row, {sums.records} rows up to number {sums.last}"
    if row.raw_bytes != sums.raw_nbytes:
        yield f"raw_bytes is {row.raw_bytes}, the records have {sums.raw_nbytes}"
    if not sums.stored_nbytes <= row.stored_bytes <= sums.stored_nbytes + sums.records:
        yield f"stored_bytes is {row.stored_bytes}, the records have {sums.stored_nbytes}"
    if len({len(shape) for shape in sums.shapes}) > 1:
        yield "its records have different numbers of axes"
        return
    largest = tuple(max(axis) for axis in zip(*sums.shapes, strict=True))
    if sums.records and largest != row.max_shape:
        yield f"max_shape is {list(row.max_shape)}, the records reach {list(largest)}"
