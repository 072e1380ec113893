"""The checks of a rank's PUTs and definitions: whether they can be believed. No state.

A descriptor comes from another process. It decides which bytes of the arena are read and how they are interpreted.
Each of its numbers is therefore checked as a Python int before anything is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import msgspec
import numpy as np

from capd.server.rank.arena import MAX_ARENA_NBYTES, Arena
from capd.store.documents.json_document import MAX_DEPTH, is_shallow
from capd.store.format.statistics import is_whole
from capd_client.errors import ProtocolError
from capd_client.protocol.counter_page import PAGE_NBYTES
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.messages import Define, Descriptor, Part, Put
from capd_client.protocol.statistics_row import BINS, NO_ROW_DTYPES, ROW_FIELDS, ROW_NBYTES

__all__ = ["Checked", "believes_row", "check_put", "define_problem", "descriptor_problem"]

_ROW_ALIGNMENT = 8
# Only integers of at most 32 bits have rows.
_MAX_WHOLE = 1 << 32

_json_object = msgspec.json.Decoder(dict[str, object])

# A descriptor, its definition, and its error.
Checked = tuple[Descriptor, "Define | None", "str | None"]


def define_problem(define: Define) -> str | None:
    """Return why no record under `define` can be stored, as the NACKs' text; None if nothing is wrong with it."""
    try:
        json.dumps(define.attributes, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return f"attributes of key id {define.id} hold a value that JSON cannot represent: {error}"
    if not is_shallow(define.attributes):
        return f"attributes of key id {define.id} are nested more than {MAX_DEPTH} levels deep"
    return None


def check_put(
    message: Put, keys: Mapping[int, Define], key_problems: Mapping[int, str], arena: Arena
) -> tuple[list[Checked], dict[int, bytes]]:
    """Check a batch: return each descriptor with its definition and its error, and the rank's statistics rows.

    It asks the kernel about pages, so it runs before the rank's lock is taken. The rows are by sequence.

    Raises:
        ProtocolError: The sequences of the batch do not ascend.
    """
    items: list[Checked] = []
    rows: dict[int, bytes] = {}
    previous = -1
    for item in message.items:
        if item.sequence <= previous:
            raise ProtocolError(f"sequence {item.sequence} follows {previous} in one batch")
        previous = item.sequence
        define = keys.get(item.key_id)
        problem = key_problems.get(item.key_id) or descriptor_problem(item, define, arena.nbytes)
        problem = problem or _unwritten(item, arena)
        if problem is None and define is not None and item.row_offset is not None:
            row = bytes(arena.slice(item.row_offset, ROW_NBYTES))
            if believes_row(row, define.dtype, item.shape):
                rows[item.sequence] = row
            elif not item.payload:
                problem = f"the statistics row at {item.row_offset} contradicts the tensor, or itself"
        items.append((item, define, problem))
    return items, rows


def _unwritten(item: Descriptor, arena: Arena) -> str | None:
    if not arena.is_written(item.offset, item.nbytes):
        return f"not all of the {item.nbytes} bytes at offset {item.offset} were ever written"
    if item.row_offset is not None and not arena.is_written(item.row_offset, ROW_NBYTES):
        return f"the statistics row at {item.row_offset} was never written"
    return None


def descriptor_problem(item: Descriptor, define: Define | None, arena_nbytes: int) -> str | None:
    """Return the error in `item`, as the NACK's text; None if every field is consistent.

    The protocol's types have already checked the limits of its fields. `define` is None if its key id was never
    defined on this connection.
    """
    if define is None:
        return f"key id {item.key_id} was never defined on this connection"
    item_nbytes = ITEM_NBYTES.get(define.dtype)
    if item_nbytes is None:
        return f"dtype {define.dtype[:64]!r} is not one this daemon stores"
    elements = math.prod(item.shape)
    # An empty tensor has no bytes, but its other extents still become chunks and indices.
    extents = elements or math.prod(max(1, extent) for extent in item.shape)
    if extents * item_nbytes > MAX_ARENA_NBYTES:
        return f"shape {item.shape} of {define.dtype} is larger than any arena ({MAX_ARENA_NBYTES} bytes)"
    expected = elements * item_nbytes if item.payload or item.row_offset is None else 0
    if item.record_nbytes != expected:
        return f"shape {item.shape} of {define.dtype} has {expected} bytes, not {item.record_nbytes}"
    problem = _part_problem(item, item.part) if item.part is not None else None
    if problem is None and item.nbytes:
        problem = _place_problem(item.offset, item.nbytes, arena_nbytes)
    if problem is None and item.row_offset is not None:
        problem = _place_problem(item.row_offset, ROW_NBYTES, arena_nbytes)
        if item.row_offset % _ROW_ALIGNMENT:
            problem = f"row_offset {item.row_offset} is no multiple of {_ROW_ALIGNMENT}"
    if problem is None and item.order is not None:
        problem = _order_problem(item, item.order)
    if problem is None and item.metadata:
        problem = _metadata_problem(item.metadata)
    return problem


def _place_problem(offset: int, nbytes: int, arena_nbytes: int) -> str | None:
    if offset < PAGE_NBYTES:
        return f"offset {offset} is in the counter page (the first {PAGE_NBYTES} bytes)"
    if offset + nbytes > arena_nbytes:
        return f"{nbytes} bytes at offset {offset} pass the arena's end at {arena_nbytes}"
    return None


def _part_problem(item: Descriptor, part: Part) -> str | None:
    if part.record >= item.sequence:
        return f"record {part.record} does not come before its part {item.sequence}"
    if part.first + item.nbytes > part.nbytes or not part.nbytes:
        return f"{item.nbytes} bytes from {part.first} on are no part of a record of {part.nbytes}"
    if item.row_offset is not None:
        return "a part brings no statistics row"
    return None


def _order_problem(item: Descriptor, order: tuple[int, ...]) -> str | None:
    if sorted(order) != list(range(len(item.shape))):
        return f"order {order} does not name each axis of shape {item.shape} once"
    return None if item.part is None else "a part brings no order of axes"


# Any bit pattern may come.
@np.errstate(invalid="ignore")
def believes_row(row: bytes, dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether a rank's statistics row contradicts neither the tensor nor itself.

    The row is a copy, because the rank can still change its arena. The dtype is one that this daemon stores.
    """
    values = np.frombuffer(row, dtype="<f8")
    elements = math.prod(shape) * (2 if dtype == "float4_e2m1fn_x2" else 1)
    count, nan, infinite, zero, low, high, largest, _, squares = values[: len(ROW_FIELDS)].tolist()
    bins, fourths = values[BINS], values[-1]
    whole = bins.astype(np.int64)
    if dtype in NO_ROW_DTYPES or whole.min() < 0 or not np.array_equal(whole, bins):
        return False
    if not all(number >= 0 and number.is_integer() for number in (count, nan, infinite, zero)):
        return False
    if (
        count != elements
        or nan + infinite + zero > count
        or bins.sum() != count
        or bins[255] != nan + infinite
    ):
        return False
    if count == nan + infinite:
        consistent = all(math.isnan(end) for end in (low, high, largest))
    else:
        consistent = math.isfinite(largest) and low <= high and largest == max(abs(low), abs(high))
        if is_whole(dtype):
            consistent = consistent and low.is_integer() and high.is_integer() and largest <= _MAX_WHOLE
    return bool(consistent and squares >= 0 and fourths >= 0)


def _metadata_problem(metadata: bytes) -> str | None:
    try:
        found = _json_object.decode(metadata)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"metadata is not a JSON object: {error}"
    return None if is_shallow(found) else f"metadata is nested more than {MAX_DEPTH} levels deep"
