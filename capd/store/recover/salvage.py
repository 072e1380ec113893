"""Copies intact records from a damaged shard file into new shards, one after another.

A record is intact if its row is known and all chunks with its elements match their checksums. Small records share a
chunk, and the chunk is rewritten whenever a record joins. If the newest copy is damaged, an older one is used. Chunks
of large records are copied unchanged. Small records are encoded into new chunks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterable
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capd.errors import DamagedRecord
from capd.store.format.codecs import Encoded, chain_for, crc32c
from capd.store.format.decode import decode
from capd.store.format.dtypes import stored_shape
from capd.store.format.encode import encode_batch
from capd.store.format.frames import UNKNOWN_CLIENT, RecordRow, SeriesHeader, session_of
from capd.store.format.sharding_index import read_index
from capd.store.scan.scan import ScannedShard, read_shard
from capd.store.shards.writer import EncodedChunk, ShardWriter

__all__ = ["ShardSource", "write_records"]

Salvaged = list[tuple[int, Encoded]] | NDArray[Any]


class ShardSource:
    """A shard or `.partial` that is open for reading its intact records; a context manager.

    scanned: its journal (without runs if it has none).
    """

    def __init__(self, path: Path, header: SeriesHeader, number: int) -> None:
        """Open the file and read its journal.

        Raises:
            OSError: The file cannot be opened or read.
        """
        self.path, self._header, self._number = path, header, number
        self._chain = chain_for(header.codec, header.dtype)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = read_shard(self._fd, (header, number))
            foreign = found is None or (found.header.path, found.shard) != (header.path, number)
            self.scanned = ScannedShard(header, number, 0) if found is None or foreign else found
            # The sharding index if it is intact: slot → (offset, bytes).
            self._index: dict[int, tuple[int, int]] = {}
            with contextlib.suppress(DamagedRecord):
                self._index = {} if foreign else read_index(self._fd, header.geometry.shard_slots)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> ShardSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def take(self, number: int, row: RecordRow) -> Salvaged | None:
        """Return the elements of a record. If the file has a sharding index, the record must be in this file.

        Returns:
            Pairs of (chunk within the record, encoded chunk) for a large record; the elements of a small one. None if
            a chunk is missing or damaged, or if the file has another capture under this number.

        Raises:
            OSError: The file cannot be read.
        """
        geometry, own = self._header.geometry, self.scanned.rows.get(number, row)
        if UNKNOWN_CLIENT not in (own.client, row.client) and own.capture != row.capture:
            return None
        if geometry.is_small:
            return self._take_small(number, row)
        chunks: list[tuple[int, Encoded]] = []
        for ordinal, _ in geometry.chunks(row.shape):
            slot = geometry.slot(number, ordinal)
            place = self._index.get(slot) or self.scanned.index.get(slot)
            payload = None if place is None else self._sound(place)
            if payload is None:
                return None
            chunks.append((ordinal, Encoded.of(payload)))
        return chunks

    def _take_small(self, number: int, row: RecordRow) -> NDArray[Any] | None:
        geometry = self._header.geometry
        for place in self._copies(number):
            payload = self._sound(place)
            if payload is None:
                continue
            try:
                chunk = decode(self._chain, payload, (geometry.batch, *geometry.chunk))
            except DamagedRecord:
                continue
            # The Ellipsis keeps a record without axes an array.
            shape = stored_shape(self._header.dtype, row.shape)
            crop: Any = (number % geometry.batch, *(slice(0, n) for n in shape), ...)
            return np.array(chunk[crop])
        return None

    def _copies(self, number: int) -> Iterable[tuple[int, int]]:
        """Yield the places of a small record's chunk, newest first. Copies older than the record have zeros."""
        slot = self._header.geometry.slot(number, 0)
        if slot in self._index:
            yield self._index[slot]
        for run in reversed(self.scanned.runs):
            holds = run.commit.first + len(run.commit.rows) > number
            for other, offset, nbytes in run.commit.chunks:
                if holds and other == slot:
                    yield (offset, nbytes)

    def _sound(self, place: tuple[int, int]) -> bytes | None:
        offset, nbytes = place
        if not 0 <= offset < 1 << 62 or not 4 <= nbytes <= os.fstat(self._fd).st_size:
            return None
        try:
            payload = os.pread(self._fd, nbytes, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            # A bad sector costs only the chunk that it holds.
            return None
        if len(payload) < nbytes or struct.unpack("<I", payload[-4:])[0] != crc32c(payload[:-4]):
            return None
        return payload


def write_records(
    header: SeriesHeader, number: int, records: Iterable[tuple[RecordRow, Salvaged]], shard: ShardWriter
) -> None:
    """Commit records to a shard under consecutive numbers. The first one must be the first of a batch.

    Raises:
        OSError: The file cannot be written.
    """
    geometry, chain = header.geometry, chain_for(header.codec, header.dtype)
    raw_nbytes = prod(geometry.chunk) * geometry.itemsize
    remaining = iter(records)
    while batch := list(islice(remaining, geometry.batch)):
        rows = [row for row, _ in batch]
        chunks = [
            EncodedChunk(geometry.slot(number, ordinal), ordinal, encoded, raw_nbytes)
            for _, taken in batch
            if isinstance(taken, list)
            for ordinal, encoded in taken
        ]
        if geometry.is_small:
            small = [taken for _, taken in batch if not isinstance(taken, list)]
            encoded = encode_batch(small, 0, None, geometry, chain)
            chunks = [EncodedChunk(geometry.slot(number, 0), 0, encoded, sum(row.nbytes for row in rows))]
        session = session_of(rows[0].client)
        shard.commit(chunks, number, rows, session=session, sequence=max(0, rows[0].sequence))
        number += len(rows)
