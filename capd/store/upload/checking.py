"""The verification of an uploaded shard before its local file goes: object, local file and index must agree."""

from __future__ import annotations

import os
from pathlib import Path

from capd.store.disk.files import opened
from capd.store.format.frames import SeriesHeader
from capd.store.format.sharding_index import index_nbytes
from capd.store.objects.bucket import Bucket
from capd.store.segments.series_table import ShardObject
from capd.store.upload.local_files import FileVersion, OpenShard, extended_crc32c
from capd.store.upload.plan import PlannedShard
from capd.store.verify.file import check_file
from capd.store.verify.run import all_ids
from capd.store.verify.series import SeriesPromise

__all__ = ["damage_in", "problem_of"]

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
        FileNotFoundError: The local file is gone, or is another one than it was.
    """
    head = bucket.head(key)
    if head is None:
        return f"{bucket.address / key} is missing; the next upload must bring it again"
    if head.nbytes != known.nbytes:
        return f"{bucket.address / key} has {head.nbytes} bytes, but {known.nbytes} were uploaded"
    crc = head.crc32c if bucket.keeps_attributes else _object_crc32c(bucket, key, known.nbytes)
    if crc is None:
        return f"{bucket.address / key} has no checksum, so nothing shows that it is whole"
    if crc != known.crc32c:
        return f"{bucket.address / key} does not have the checksum that was uploaded"
    nbytes = min(known.nbytes, index_nbytes(header.geometry.shard_slots))
    try:
        with OpenShard(path) as file:
            if file.version != FileVersion.of(info):
                raise FileNotFoundError(f"{path} was replaced in the meantime")
            if (file.version.nbytes, file.crc32c()) != (known.nbytes, known.crc32c):
                return f"{path} does not have the bytes that were uploaded; `capd verify` tells more"
        tail = _tail(path, nbytes)
    except FileNotFoundError:
        raise
    except OSError as error:
        # The others can go, also when this one is on a bad block.
        return f"it cannot be read ({error}); `capd verify` tells more"
    if bucket.get_range(key, known.nbytes - nbytes, known.nbytes) != tail:
        return f"the index of {bucket.address / key} is not that of the file"
    return ""


def damage_in(run: Path, node: str, shard: PlannedShard) -> str:
    """Return what `capd verify` finds in the file of a shard; "" if nothing is wrong. Raises OSError."""
    found: list[str] = []
    promise = SeriesPromise(
        run,
        all_ids(run, run.stem),
        node,
        shard.header,
        None,
        0,
        0,
        None,
        (0,),
        {},
        {shard.number: shard.path},
    )
    check_file(shard.path, promise, shard.number, 0, lambda *one: found.append(one[2]), sealed=True)
    return found[0] if found else ""


def _object_crc32c(bucket: Bucket, key: str, nbytes: int) -> int:
    """Return the checksum of the bytes of an object."""
    crc = 0
    for start in range(0, nbytes, _PIECE_NBYTES):
        crc = extended_crc32c(crc, bucket.get_range(key, start, min(nbytes, start + _PIECE_NBYTES)))
    return crc


def _tail(path: Path, nbytes: int) -> bytes:
    with opened(path) as fd:
        return os.pread(fd, nbytes, os.fstat(fd).st_size - nbytes)
