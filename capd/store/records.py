"""Reads one record's elements back, wherever it lies: a sealed shard, a `.partial` or the small log.

Every chunk is checked against its crc32c; what cannot be read exactly raises DamagedRecord. Nothing is ever
filled in.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from capd.errors import DamagedRecord, StoreError
from capd.store.codecs import chain_for
from capd.store.encode import as_array
from capd.store.frames import RecordRow, SeriesHeader
from capd.store.layout import shard_path
from capd.store.node import NodeView
from capd.store.scan import scan_shard
from capd.store.shards import read_index
from capd.store.small import log_path, read_small

__all__ = ["RecordReader"]

_ATTEMPTS = 5  # a record can move (log → partial → sealed) between the look and the read


class RecordReader:
    """Reads records of one series of one node."""

    def __init__(self, run: Path, node: NodeView, header: SeriesHeader) -> None:
        self._run, self._node, self._header = run, node, header
        self._chain = chain_for(header.codec, header.dtype)
        # The newest of each, keyed by the file's identity: neighbouring small records share file and chunk.
        self._published: tuple[object, int] = (None, 0)
        self._index: tuple[object, dict[int, tuple[int, int]]] = (None, {})
        self._chunk: tuple[object, NDArray[np.generic] | None] = (None, None)

    def read(self, number: int, row: RecordRow) -> NDArray[np.generic]:
        """The stored bits of record `number`, cropped to its shape. Raises DamagedRecord or StoreError."""
        where = f"{self._header.path}#{number}"
        if 0 in row.shape:
            return np.empty(row.shape, dtype=self._chain.stored)
        try:
            for _ in range(_ATTEMPTS):
                found = self._from_spool(number, row)
                if found is None:
                    found = self._from_sealed(number, row)
                if found is not None:
                    return found
                self._node.spooled = self._node.read_spool()
        except DamagedRecord as error:
            raise DamagedRecord(f"{where} in {self._run}: {error}; `capd verify` lists all damage") from error
        except OSError as error:
            raise StoreError(f"cannot read {where} in {self._run}: {error}") from error
        raise DamagedRecord(f"{where} in {self._run}: no file holds it any more")

    def _from_spool(self, number: int, row: RecordRow) -> NDArray[np.generic] | None:
        spooled = self._node.spooled.get(self._header.path)
        if spooled is None:
            return None
        try:
            if number in spooled.logged:
                place, _ = spooled.logged[number]
                with _Opened(log_path(self._node.directory / "spool", place.log)) as fd:
                    raw, _, _ = read_small(fd, place.offset)
                return as_array(raw, self._chain.stored, row.shape)
            path, scanned = spooled.shards.get(number // self._header.geometry.shard_records, (None, None))
            if path is None or scanned is None or number not in scanned.rows:
                return None
            with _Opened(path) as fd:
                return self._assemble(fd, scanned.index, number, row)
        except FileNotFoundError:
            return None

    def _from_sealed(self, number: int, row: RecordRow) -> NDArray[np.generic] | None:
        path = shard_path(self._run, self._header, number // self._header.geometry.shard_records)
        try:
            if (
                number >= self._published_records()
            ):  # renamed a moment ago, or not there yet: its own journal knows
                scanned = scan_shard(path)
                if scanned is None or number not in scanned.rows:
                    return None
            with _Opened(path) as fd:
                identity = _identity(os.fstat(fd))
                if self._index[0] != identity:
                    self._index = (identity, read_index(fd, self._header.geometry.shard_slots))
                return self._assemble(fd, self._index[1], number, row)
        except FileNotFoundError:
            return None

    def _published_records(self) -> int:
        path = self._run / self._header.path / "data" / "zarr.json"
        identity = _identity(path.stat())
        if self._published[0] != identity:
            self._published = (identity, int(json.loads(path.read_bytes())["shape"][0]))
        return self._published[1]

    def _assemble(
        self, fd: int, index: dict[int, tuple[int, int]], number: int, row: RecordRow
    ) -> NDArray[np.generic]:
        geometry = self._header.geometry
        record = np.empty(row.shape, dtype=self._chain.stored)
        inside = number % geometry.batch
        for ordinal, slices in geometry.chunks(row.shape):
            place = index.get(geometry.slot(number, ordinal))
            if place is None:
                raise DamagedRecord(f"chunk {ordinal} is missing from the shard's index")
            chunk = self._decoded(fd, number // geometry.shard_records, place)[inside]
            lengths = tuple(slice(0, part.stop - part.start) for part in slices)
            record[slices] = chunk[lengths]
        return record

    def _decoded(self, fd: int, shard: int, place: tuple[int, int]) -> NDArray[np.generic]:
        geometry = self._header.geometry
        identity = (_identity(os.fstat(fd)), shard, place)
        held = self._chunk[1]
        if held is None or self._chunk[0] != identity:
            payload = os.pread(fd, place[1], place[0])
            held = self._chain.decode(payload, (geometry.batch, *geometry.chunk))
            if geometry.batch > 1:
                self._chunk = (identity, held)
        return held


def _identity(stat: os.stat_result) -> tuple[int, int, int, int]:
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


class _Opened:
    """A file descriptor for reading, closed at the end of the block."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> int:
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
