"""Whether an uploaded series really is in the object store: before local files may go."""

from __future__ import annotations

import os
from pathlib import Path

from capd.errors import CapdError
from capd.store.disk.files import opened
from capd.store.disk.layout import shard_path
from capd.store.format.sharding_index import index_nbytes
from capd.store.objects.bucket import Bucket
from capd.store.segments.series_table import SeriesEntry, ShardObject
from capd.store.upload.local_files import OpenShard
from capd.store.upload.plan import shard_key

__all__ = ["verify_remote", "verify_shard"]


def verify_remote(bucket: Bucket, run: Path, entry: SeriesEntry, *, with_index: bool = False) -> str:
    """Return what is wrong with the uploaded shards of a series; "" if nothing is.

    Args:
        bucket: The place of the run.
        run: The local run.
        entry: The series as the manifest has it.
        with_index: Whether the index of each shard is read back and compared with the local one.
    """
    found = (verify_shard(bucket, run, entry, shard, with_index=with_index) for shard in entry.shards)
    return next((problem for problem in found if problem), "")


def verify_shard(
    bucket: Bucket, run: Path, entry: SeriesEntry, shard: ShardObject, *, with_index: bool = False
) -> str:
    """Return what is wrong with one uploaded shard; "" if nothing is.

    The object has the size and the checksum of the manifest, and the local file does, too.
    """
    key = shard_key(entry.row, shard.shard)
    place = bucket.address / key
    try:
        head = bucket.head(key)
        if head is None:
            return f"{place} is missing"
        if head.nbytes != shard.nbytes:
            return f"{place} has {head.nbytes} bytes, but its manifest says {shard.nbytes}"
        if bucket.keeps_attributes and head.crc32c != shard.crc32c:
            return f"{place} has another checksum than its manifest says"
        file = shard_path(run, entry.row.header, shard.shard)
        with OpenShard(file) as local:
            if (local.version.nbytes, local.crc32c()) != (shard.nbytes, shard.crc32c):
                return f"{file} has changed since its upload"
        if with_index:
            nbytes = min(shard.nbytes, index_nbytes(entry.row.header.geometry.shard_slots))
            if bucket.get_range(key, shard.nbytes - nbytes, shard.nbytes) != _tail(file, nbytes):
                return f"the index of {place} differs from the local one"
    except (CapdError, OSError) as error:
        return str(error)
    return ""


def _tail(file: Path, nbytes: int) -> bytes:
    with opened(file) as fd:
        size = os.fstat(fd).st_size
        return os.pread(fd, nbytes, size - nbytes)
