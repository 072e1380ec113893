"""One open shard file: frames appended to a `.partial` in the spool until it gets its index and final name.

A ShardWriter is owned by the append thread. It keeps the index in memory; descriptors come from an LRU, so
thousands of open shards need few of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from capd.errors import DamagedRecord, StoreError
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import copy_range, new_file, pwrite_all, rename, start_writeback, truncate, unlink
from capd.store.disk.open_files import OpenFiles
from capd.store.format.codecs import Encoded
from capd.store.format.frames import FileHeader, FrameKind, RecordRow, encode_commit, frame, frame_header
from capd.store.format.sharding_index import index_bytes, index_nbytes, read_index
from capd.store.scan.scan import read_shard

__all__ = ["EncodedChunk", "ShardWriter"]

_PIECE_NBYTES = 16 << 20
_WRITEBACK_NBYTES = 32 << 20
_encode = msgspec.msgpack.Encoder().encode


class EncodedChunk(NamedTuple):
    """One encoded inner chunk on its way into a shard. slot: index entry; ordinal: chunk within the record."""

    slot: int
    ordinal: int
    encoded: Encoded
    raw_nbytes: int


class _Run:
    """Gathers frames and writes them behind each other in large pieces."""

    def __init__(self, fd: int, offset: int) -> None:
        self._fd, self._at, self._end = fd, offset, offset
        self._parts: list[bytes] = []

    def add(self, head: bytes, *payload: bytes) -> int:
        """Append a frame; returns the offset of its payload."""
        self._parts += [head, *payload]
        at = self._end + len(head)
        self._end = at + sum(map(len, payload))
        if self._end - self._at >= _PIECE_NBYTES:
            self.finish()
        return at

    def finish(self) -> int:
        """Write what is gathered; returns the offset behind it."""
        self._at = pwrite_all(self._fd, self._parts, self._at)
        self._parts = []
        return self._at


class ShardWriter:
    """Appends records to one `.partial` file; `seal` turns it into a shard that Zarr readers understand."""

    def __init__(
        self,
        path: Path,
        files: OpenFiles,
        number: int,
        end: int,
        index: dict[int, tuple[int, int]],
        *,
        has_records: bool,
        replaces: bool = False,
    ) -> None:
        """number: of the shard. end: offset to append at. replaces: a sealed file of this shard stands already."""
        self.path = path
        self.number = number
        self.end = end
        self.index = index
        self.has_records = has_records
        self.replaces = replaces
        self._files = files
        self._written_back = end
        # ordinal → (bytes, crc, offset) of the last record's chunks
        self._previous: dict[int, tuple[int, int, int]] = {}

    @classmethod
    def create(cls, path: Path, files: OpenFiles, header: FileHeader) -> ShardWriter:
        """Start an empty shard file with its HEADER frame."""
        payload = _encode(header)
        failpoint("create.before_header")
        end = new_file(path, [frame(FrameKind.HEADER, payload), payload])
        files.created(path, end)
        failpoint("create.after_header")
        return cls(path, files, header.shard, end, {}, has_records=False)

    @classmethod
    def reopen(
        cls, path: Path, files: OpenFiles, number: int, sealed: Path, slots: int, record: int
    ) -> ShardWriter:
        """Continue a sealed, partly filled shard with record `record`: all but its index is copied to `path`.

        Raises DamagedRecord where nothing sound says which copies of its chunks are the newest.
        """
        source = os.open(sealed, os.O_RDONLY | os.O_CLOEXEC)
        try:
            index, end = _index_and_end(source, slots, record)
            temporary = path.with_suffix(".tmp")
            target = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                copy_range(source, target, end)
            finally:
                os.close(target)
            failpoint("reopen.before_rename")
            rename(temporary, path)  # a half-copied file never bears a name that recovery trusts
        finally:
            os.close(source)
        files.created(path, end)
        return cls(path, files, number, end, index, has_records=True, replaces=True)

    def commit(
        self,
        chunks: Iterable[EncodedChunk],
        first: int,
        rows: Sequence[RecordRow | bytes],
        *,
        session: int,
        sequence: int,
    ) -> int:
        """Append the chunks and the COMMIT of records first, first+1, … as one contiguous run. Returns bytes written.

        rows: looked at behind the last chunk; bytes are encoded already. Chunks are written as they come, so a
        record larger than memory passes through. A chunk equal to the same chunk of the record before is stored
        once. If anything fails the file is cut back and the error raised: nothing of the record remains.
        """
        fd = self._files.get(self.path)
        run = _Run(fd, self.end)
        placed: dict[int, tuple[int, int, int]] = {}
        entries: list[tuple[int, int, int]] = []
        try:
            for chunk in chunks:
                slot, ordinal, encoded, raw_nbytes = chunk
                nbytes, crc = encoded.nbytes, encoded.crc
                at = self._twin(fd, chunk)
                if at is None:
                    head = frame_header(FrameKind.CHUNK, nbytes, crc, ordinal, session, sequence, raw_nbytes)
                    at = run.add(head, *encoded.parts)
                placed[ordinal] = (nbytes, crc, at)
                entries.append((slot, at, nbytes))
            payload = encode_commit(first, rows, entries)
            run.add(frame(FrameKind.COMMIT, payload, session=session, sequence=sequence), payload)
            failpoint("commit.before_write")
            end = run.finish()
            failpoint("commit.after_write")
        except BaseException:
            with contextlib.suppress(OSError):
                truncate(fd, self.end)
            raise
        self._files.wrote(self.path, self.end, end)
        written, self.end, self._previous = end - self.end, end, placed
        self.has_records = True
        self.index.update((slot, (at, nbytes)) for slot, at, nbytes in entries)
        self._start_writeback(fd)
        return written

    def _start_writeback(self, fd: int) -> None:
        """Ask the kernel to write early, without waiting: a seal then finds little left to sync."""
        if self.end - self._written_back >= _WRITEBACK_NBYTES:
            start_writeback(fd, self._written_back, self.end - self._written_back)
            self._written_back = self.end

    def _twin(self, fd: int, chunk: EncodedChunk) -> int | None:
        """Where the record before has the same chunk."""
        encoded, known = chunk.encoded, self._previous.get(chunk.ordinal)
        if known is None or known[:2] != (encoded.nbytes, encoded.crc):
            return None
        return known[2] if os.pread(fd, known[0], known[2]) == b"".join(encoded.parts) else None

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of a chunk that was written before."""
        return os.pread(self._files.get(self.path), nbytes, offset)

    def write_index(self, slots: int) -> None:
        """Write the sharding index after the frames."""
        fd = self._files.get(self.path)
        end = pwrite_all(fd, [index_bytes(self.index, slots)], self.end)
        truncate(fd, end)

    def rename(self, target: Path) -> None:
        """Give the indexed file its final name. Raises StoreError rather than replace a shard it did not continue."""
        if target.exists() and not self.replaces:
            raise StoreError(f"{target} stands already and is not what {self.path} continues; both are kept")
        self._files.forget(self.path)
        rename(self.path, target)

    def discard(self) -> None:
        """Give up a file without records."""
        self._files.forget(self.path)
        unlink(self.path, missing_ok=True)


def _index_and_end(fd: int, slots: int, records: int) -> tuple[dict[int, tuple[int, int]], int]:
    """Of a sealed shard with the records below number `records`: its index and where that begins, by the frames if the
    index is damaged."""
    try:
        return read_index(fd, slots), os.fstat(fd).st_size - index_nbytes(slots)
    except DamagedRecord:
        scanned = read_shard(fd)
        if scanned is None:
            raise
        if scanned.covering(records) != scanned.index:
            raise DamagedRecord(
                "the shard lost its index and a COMMIT; `capd verify RUN --repair -o NEW` saves the rest"
            ) from None
        return scanned.index, scanned.end
