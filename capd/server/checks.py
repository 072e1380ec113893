"""Decides whether what a rank wrote in a descriptor can be believed. Pure: no I/O, no state.

A descriptor comes from another process and decides which bytes of its arena are read and how they are
interpreted, so each of its numbers is checked with Python ints before anything is touched.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

from capd.server.arena import MAX_ARENA_NBYTES
from capd_client.dtypes import ITEM_NBYTES
from capd_client.protocol import PAGE_NBYTES, Define, Descriptor

__all__ = ["MAX_METADATA_DEPTH", "define_problem", "descriptor_problem"]

MAX_METADATA_DEPTH = 64  # deeper JSON could exhaust a reader's recursion limit

_json_object = msgspec.json.Decoder(dict[str, Any])


def define_problem(define: Define) -> str | None:
    """Why no record under `define` can be stored, for the NACKs' text; None when nothing is wrong with it."""
    try:
        json.dumps(define.attributes, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return f"attributes of key id {define.id} hold something that JSON does not: {error}"
    if _depth(define.attributes) > MAX_METADATA_DEPTH:
        return f"attributes of key id {define.id} are nested more than {MAX_METADATA_DEPTH} levels deep"
    return None


def descriptor_problem(item: Descriptor, define: Define | None, arena_nbytes: int) -> str | None:
    """What is wrong with `item`, for the NACK's text; None when every field is consistent.

    Args:
        item: the descriptor as decoded (field limits are already checked by the protocol's types).
        define: what its key_id stands for on this connection, None where nothing was defined.
        arena_nbytes: size of the sender's arena in bytes, counter page included.
    """
    if define is None:
        return f"key id {item.key_id} was never defined on this connection"
    item_nbytes = ITEM_NBYTES.get(define.dtype)
    if item_nbytes is None:
        return f"dtype {define.dtype[:64]!r} is not one this daemon stores"
    # An empty tensor has no bytes, but its other extents still become chunks and indices.
    if math.prod(max(1, extent) for extent in item.shape) * item_nbytes > MAX_ARENA_NBYTES:
        return f"shape {item.shape} of {define.dtype} is larger than any arena ({MAX_ARENA_NBYTES} bytes)"
    expected = math.prod(item.shape) * item_nbytes
    if item.nbytes != expected:
        return f"shape {item.shape} of {define.dtype} has {expected} bytes, not {item.nbytes}"
    if item.nbytes:
        if item.offset < PAGE_NBYTES:
            return f"offset {item.offset} lies in the counter page (the first {PAGE_NBYTES} bytes)"
        if item.offset + item.nbytes > arena_nbytes:
            return f"{item.nbytes} bytes at offset {item.offset} pass the arena's end at {arena_nbytes}"
    if item.metadata:
        return _metadata_problem(item.metadata)
    return None


def _metadata_problem(metadata: str) -> str | None:
    try:
        _json_object.decode(metadata)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        return f"metadata is not a JSON object: {error}"
    if (
        metadata.count("[") + metadata.count("{") > MAX_METADATA_DEPTH
        and _depth(_json_object.decode(metadata)) > MAX_METADATA_DEPTH
    ):
        return f"metadata is nested more than {MAX_METADATA_DEPTH} levels deep"
    return None


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level := [child for parent in level for child in _children(parent)]:
        deepest += 1
        if deepest > MAX_METADATA_DEPTH:
            break
    return deepest


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
