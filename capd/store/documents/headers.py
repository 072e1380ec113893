"""The checks of a series' header and of a record's row: both come from a disk, and their file may come from anybody."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from math import prod

from capd.errors import CapdError
from capd.store.documents.json_document import is_shallow
from capd.store.format.codecs import chain_for
from capd.store.format.dtypes import is_statistics, stored_shape
from capd.store.format.frames import MAX_PAYLOAD_NBYTES, RecordRow, SeriesHeader
from capd.store.format.geometry import MAX_SHARD_RECORDS, Geometry
from capd.store.format.statistics import is_possible
from capd_client.protocol.key import MAX_NDIM

__all__ = ["SERIES_PATH", "fits", "is_usable", "sound_row"]

# An index of 256 MiB.
_MAX_SLOTS = 1 << 24
SERIES_PATH = re.compile(r"(?:[A-Za-z0-9_~\-][A-Za-z0-9_.~\-]*/){4}[A-Za-z0-9_~\-][A-Za-z0-9_.~\-]*\Z")


def is_usable(header: SeriesHeader) -> bool:
    """Return whether all claims of a header are possible: sizes, names, codec and attributes."""
    if not _is_possible(header.geometry) or not SERIES_PATH.match(header.path):
        return False
    if not is_shallow(header.attributes) or (is_statistics(header.dtype) and not _is_of_statistics(header)):
        return False
    try:
        chain = chain_for(header.codec, header.dtype)
        # msgpack has more types than JSON.
        json.dumps(header.attributes)
    except (CapdError, KeyError, ValueError, TypeError, RecursionError):
        return False
    return chain.stored.itemsize == header.geometry.itemsize


def fits(header: SeriesHeader, shape: tuple[int, ...], nbytes: int) -> bool:
    """Return whether a record of this shape and size can belong to the series."""
    stored = stored_shape(header.dtype, shape)
    if len(shape) > MAX_NDIM or min(shape, default=0) < 0 or not header.geometry.fits(stored):
        return False
    return nbytes == prod(stored) * header.geometry.itemsize


def sound_row(row: RecordRow, header: SeriesHeader) -> RecordRow:
    """Return the row if its shape, statistics and texts are valid.

    Raises:
        ValueError: The row is not valid.
    """
    for text in (row.metadata, row.attributes):
        if text and not (isinstance(found := json.loads(text), dict) and is_shallow(found)):
            raise ValueError("a record's metadata is not a JSON object")
    if not fits(header, row.shape, row.nbytes):
        raise ValueError("a record's shape does not fit its series")
    if row.stats is not None and not is_possible(row.stats):
        raise ValueError("a record's statistics are impossible")
    return row


def _is_of_statistics(header: SeriesHeader) -> bool:
    return header.geometry.extents == header.geometry.chunk == stored_shape(header.dtype, ())


@lru_cache(1024)
def _is_possible(g: Geometry) -> bool:
    sizes = (*g.extents, *g.chunk, g.batch, g.shard_records, g.itemsize)
    if len(g.extents) != len(g.chunk) or len(g.extents) > MAX_NDIM or min(sizes) < 1:
        return False
    if g.shard_records > MAX_SHARD_RECORDS or g.shard_records % g.batch:
        return False
    if any(extent % chunk for extent, chunk in zip(g.extents, g.chunk, strict=True)):
        return False
    return g.shard_slots <= _MAX_SLOTS and g.batch * prod(g.chunk) * g.itemsize <= MAX_PAYLOAD_NBYTES
