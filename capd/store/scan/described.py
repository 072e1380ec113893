"""The identity of a series from its published metadata, and how that metadata differs from the writer's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from capd.errors import CapdError
from capd.store.documents.headers import is_usable
from capd.store.documents.zarr_json import array_differences, array_document, series_document
from capd.store.format.codecs import codec_of
from capd.store.format.columns import Columns
from capd.store.format.dtypes import errors_of, statistics_of, stored_type
from capd.store.format.frames import SeriesHeader
from capd.store.format.geometry import Geometry
from capd.store.scan.published import read_array, read_published
from capd_client.protocol.key import Key

__all__ = ["array_problems", "described", "group_problems"]


def described(run: Path, path: str) -> tuple[SeriesHeader, str] | None:
    """Return header and node of the series at `path`, from its documents.

    None if the documents are not exactly those that capd writes.
    """
    try:
        published, array = read_published(run / path), read_array(run / path)
        capd = published.document["attributes"]["capd"]
        dtype = str(capd["dtype"])
        if capd["encoding"] == "statistics":
            dtype = statistics_of(dtype)
        elif capd["encoding"] == "errors":
            dtype = errors_of(dtype)
        header = SeriesHeader(
            path,
            msgspec.convert(capd["key"], Key),
            dtype,
            codec_of(array["codecs"][0]["configuration"]["codecs"]),
            _geometry(array, dtype),
            dict(capd["attributes"]),
        )
        sound = (
            is_usable(header)
            and not any(array_problems(array, header))
            and not any(group_problems(published.document, header, published.node))
        )
    except (CapdError, LookupError, TypeError, ValueError):
        # The errors of msgspec are ValueErrors.
        return None
    return (header, published.node) if sound else None


def group_problems(document: dict[str, Any], header: SeriesHeader, node: str) -> Iterator[str]:
    """Yield how a series group's metadata differs from the writer's, apart from its records."""
    expected = json.loads(series_document(header, node, Columns()))
    if any(document.get(name) != expected[name] for name in ("zarr_format", "node_type")):
        yield "is not the metadata of a Zarr group"
    found, wanted = document["attributes"]["capd"], expected["attributes"]["capd"]
    for name in wanted.keys() - {"records"}:
        if found.get(name) != wanted[name]:
            yield f"{name} is {found.get(name)!r}, but the shards give {wanted[name]!r}"


def array_problems(document: dict[str, Any], header: SeriesHeader) -> Iterator[str]:
    """Yield how an array's metadata differs from the writer's. Its shape may be smaller than the shards' extents."""
    extents = list(header.geometry.extents)
    yield from array_differences(document, json.loads(array_document(header, (0, *extents))))
    shape = document["shape"]
    if len(shape) != 1 + len(extents) or any(n > e for n, e in zip(shape[1:], extents, strict=False)):
        yield f"shape is {shape}, but the shards hold records of up to {extents}"


def _geometry(array: dict[str, Any], dtype: str) -> Geometry:
    shard_records, *extents = array["chunk_grid"]["configuration"]["chunk_shape"]
    batch, *chunk = array["codecs"][0]["configuration"]["chunk_shape"]
    geometry = (tuple(extents), tuple(chunk), batch, shard_records, stored_type(dtype).stored.itemsize)
    return msgspec.convert(geometry, Geometry)
