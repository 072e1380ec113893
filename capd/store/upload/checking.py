"""The verification of an uploaded shard before its local file goes: object, local file and index must agree."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import google_crc32c

from capd.store.format.frames import SeriesHeader
from capd.store.format.sharding_index import index_nbytes
from capd.store.objects.bucket import Bucket
from capd.store.segments.series_table import ShardObject

__all__ = ["problem_of"]

_PIECE_NBYTES = 8 << 20


def problem_of(
    bucket: Bucket, key: str, path: Path, info: os.stat_result, known: ShardObject, header: SeriesHeader
) -> str:
    """Return why the object of a shard does not replace its local file; "" if it does.

    The object must have the size and the checksum that the manifest promises, and the index of the local file. Files
    have no attributes, so the bytes of a file:// object are read. The bytes of the local file are compared, too.

    Args:
        bucket: The place of the run.
        key: The key of the object.
        path: The local file.
        info: The file as it was found.
        known: The object as the series segment names it.
        header: The series.

    Raises:
        ObjectStoreError: The object store does not answer.
        OSError: The local file cannot be read, or is another one than it was.
    """
    head = bucket.head(key)
    if head is None:
        return f"{bucket.address / key} is missing; the next upload must bring it again"
    if head.nbytes != known.nbytes:
        return f"{bucket.address / key} has {head.nbytes} bytes, but {known.nbytes} were uploaded"
    crc = (
        head.crc32c
        if bucket.keeps_attributes
        else _crc_of(known.nbytes, lambda a, b: bucket.get_range(key, a, b))
    )
    if crc is None:
        return f"{bucket.address / key} has no checksum, so nothing shows that it is whole"
    if crc != known.crc32c:
        return f"{bucket.address / key} does not have the checksum that was uploaded"
    with open(path, "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        if (found.st_ino, found.st_size) != (info.st_ino, info.st_size):
            raise FileNotFoundError(f"{path} was replaced in the meantime")
        tail = index_nbytes(header.geometry.shard_slots)
        start = max(0, known.nbytes - tail)
        index = os.pread(file.fileno(), tail, start)
        if bucket.get_range(key, start, known.nbytes) != index:
            return f"the index of {bucket.address / key} is not that of the file"
        if _crc_of(known.nbytes, lambda a, b: os.pread(file.fileno(), b - a, a)) != known.crc32c:
            return "the file does not have the bytes that were uploaded; `capd verify` tells more"
    return ""


def _crc_of(nbytes: int, read: Callable[[int, int], bytes]) -> int:
    """Return the checksum of bytes that are read in pieces."""
    crc = 0
    for start in range(0, nbytes, _PIECE_NBYTES):
        crc = google_crc32c.extend(crc, read(start, min(nbytes, start + _PIECE_NBYTES)))
    return int(crc)
