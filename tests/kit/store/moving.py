"""Uploads the shards of a run and moves them, for tests of what is left on the local disk."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.rows import CATALOG_NAME, read_series
from capd.store.disk.layout import node_directory, shard_path
from capd.store.format.codecs import crc32c
from capd.store.objects.address import Address
from capd.store.objects.bucket import Bucket
from capd.store.segments.series_table import SeriesEntry, ShardObject
from capd.store.upload.move_policy import MovePolicy
from capd.store.upload.moving import ShardMover, UploadedPart
from tests.kit.store.writing import Writer, key

AT_ONCE = MovePolicy(after_s=0)
LARGE, SMALL = (f"bf16/rank0/layer0/pre/tensor.forward.{name}" for name in ("large", "small"))
_RNG = np.random.default_rng(29)


def put_steps(writer: Writer, first: int, last: int) -> None:
    """Put one large record at each step, and eight small ones, of which sixteen share a chunk."""
    for iteration in range(first, last):
        bits = _RNG.standard_normal((300, 400)).astype("f4")
        writer.put(key("large"), "float32", bits, iteration=iteration)
        for call in range(8):
            bits = _RNG.standard_normal((250, 64)).astype("f4")
            writer.put(key("small"), "float32", bits, iteration=iteration, call=call)


def written(root: Path, steps: int = 9, **names: str) -> Writer:
    """A closed writer of a sealed run whose series have several shards, of which the last is not full."""
    writer = Writer(root, shard_nbytes=1 << 20, **names)
    put_steps(writer, 0, steps)
    writer.close()
    return writer


def address_of(place: Path) -> Address:
    """The address of a directory."""
    return Address("file", "", str(place.absolute()).strip("/"))


def uploaded(run: Path, address: Address, node: str = "n0") -> UploadedPart:
    """Bring all shards of a node's part to an address, as an upload does. Return what its manifest would say."""
    bucket = Bucket(address / run.name)
    entries = []
    with contextlib.closing(connect_read_only(node_directory(run, node) / CATALOG_NAME)) as database:
        rows = read_series(database)
    for row in rows:
        entry = SeriesEntry(row)
        for number in range(-(-row.sealed // row.header.geometry.shard_records)):
            path = shard_path(run, row.header, number)
            payload = path.read_bytes()
            known = ShardObject(number, len(payload), crc32c(payload))
            bucket.put_file(path.relative_to(run).as_posix(), path, known.nbytes, known.crc32c)
            entry.shards.append(known)
        entries.append(entry)
    return UploadedPart(run, node, bucket, entries)


def moved(run: Path, address: Address, node: str = "n0") -> ShardMover:
    """Upload a part and move all shards that may go."""
    mover = ShardMover(AT_ONCE)
    mover.move([uploaded(run, address, node)])
    assert (mover.shards > 0, mover.refused) == (True, 0)
    return mover
