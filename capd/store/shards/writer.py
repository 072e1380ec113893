"""An open shard file: frames are appended to a `.partial` in the spool until it gets its index and final name.

The append thread owns a ShardWriter. It keeps the index in memory. Descriptors come from an LRU cache, so thousands of
open shards need only few of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from capd.errors import DamagedRecord, StoreError
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import (
    copy_range,
    new_file,
    opened,
    pwrite_all,
    rename,
    start_writeback,
    truncate,
    unlink,
)
from capd.store.disk.open_files import OpenFiles
from capd.store.format.codecs import Encoded
from capd.store.format.frames import FileHeader, FrameKind, RecordRow, encode_commit, frame, frame_header
from capd.store.format.sharding_index import index_bytes, index_nbytes, read_index
from capd.store.scan.scan import read_shard
from capd.store.shards.compact import Kept, compact

__all__ = ["EncodedChunk", "ShardWriter"]

_PIECE_NBYTES = 16 << 20
_WRITEBACK_NBYTES = 32 << 20
# A shard is copied when more than this part of it is replaced chunks: 1/16.
_WORTH_A_COPY = 16
# More than a record takes in a COMMIT, nearly always.
_COMMIT_NBYTES = 1024
_encode = msgspec.msgpack.Encoder().encode


class EncodedChunk(NamedTuple):
    """One encoded inner chunk for a shard. slot: the index entry. ordinal: the chunk within the record."""

    slot: int
    ordinal: int
    encoded: Encoded
    raw_nbytes: int


class _Run:
    """A contiguous run of frames, which are collected and written in large pieces."""

    def __init__(self, fd: int, offset: int) -> None:
        self._fd, self._at, self._end = fd, offset, offset
        self._parts: list[bytes] = []

    def add(self, head: bytes, *payload: bytes) -> int:
        """Append a frame. Return the offset of its payload."""
        self._parts += [head, *payload]
        at = self._end + len(head)
        self._end = at + sum(map(len, payload))
        if self._end - self._at >= _PIECE_NBYTES:
            self.finish()
        return at

    def finish(self) -> int:
        """Write the collected frames. Return the offset after them."""
        self._at = pwrite_all(self._fd, self._parts, self._at)
        self._parts = []
        return self._at


class ShardWriter:
    """The writer of one `.partial` file.

    `write_index` and `rename` turn the file into a shard that Zarr readers understand.
    """

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
        replaced_nbytes: int = 0,
    ) -> None:
        """Continue an existing `.partial` file.

        Args:
            path: The file.
            files: The run's open files.
            number: The number of the shard.
            end: The offset at which the next frame is appended.
            index: The index entries so far: slot → (offset, bytes).
            has_records: Whether the file has a record.
            replaces: Whether a sealed file of this shard exists, which the `.partial` replaces.
            replaced_nbytes: The bytes of chunks in the file that later chunks replaced.
        """
        self.path = path
        self.number = number
        self.end = end
        self.index = index
        self.has_records = has_records
        self.replaces = replaces
        self.replaced_nbytes = replaced_nbytes
        # The copy without replaced chunks, once it is written, and its joined records.
        self._compact: Path | None = None
        self.kept: list[Kept] = []
        self._files = files
        self._written_back = end
        # Ordinal → (bytes, crc, offset) of the last record's chunks.
        self._previous: dict[int, tuple[int, int, int]] = {}

    @classmethod
    def create(cls, path: Path, files: OpenFiles, header: FileHeader) -> ShardWriter:
        """Create an empty shard file with its HEADER frame."""
        payload = _encode(header)
        failpoint("create.before_header")
        end = new_file(path, [frame(FrameKind.HEADER, payload), payload])
        files.created(path, end)
        failpoint("create.after_header")
        return cls(path, files, header.shard, end, {}, has_records=False)

    @classmethod
    def reopen(
        cls, path: Path, files: OpenFiles, number: int, sealed: Path, slots: int, record: int, inside: int
    ) -> ShardWriter:
        """Continue a sealed shard that is not full. Everything except its index is copied to the new file `path`.

        Args:
            path: The new file.
            files: The run's open files.
            number: The number of the shard.
            sealed: The sealed shard.
            slots: The number of entries in its index.
            record: The number of the next record.
            inside: The number of records in the shard.

        Raises:
            DamagedRecord: Nothing intact identifies the newest copies of the chunks.
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
            # An incomplete copy must never have a name that recovery trusts.
            rename(temporary, path)
        finally:
            os.close(source)
        files.created(path, end)
        replaced = _replaced_nbytes(index, end, inside)
        return cls(path, files, number, end, index, has_records=True, replaces=True, replaced_nbytes=replaced)

    def commit(
        self,
        chunks: Iterable[EncodedChunk],
        first: int,
        rows: Sequence[RecordRow | bytes],
        *,
        session: int,
        sequence: int,
    ) -> int:
        """Append chunks and the COMMIT of records first, first+1, … as one contiguous run.

        Chunks are written as they arrive, so a record can be larger than memory. A chunk that equals the same chunk of
        the previous record is stored once. After any error the file is truncated, and nothing of the record remains.

        Args:
            chunks: The encoded chunks.
            first: The number of the first record.
            rows: The rows of the records, or their encoded bytes. They are read after the last chunk.
            session: The session of the frames.
            sequence: The client's sequence number.

        Returns:
            The number of written bytes.
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
        self.replaced_nbytes += sum(self.index[slot][1] for slot, _, _ in entries if slot in self.index)
        self.index.update((slot, (at, nbytes)) for slot, at, nbytes in entries)
        self._start_writeback(fd)
        return written

    def _start_writeback(self, fd: int) -> None:
        """Ask the kernel to write early, without waiting. A seal then has little left to sync."""
        if self.end - self._written_back >= _WRITEBACK_NBYTES:
            start_writeback(fd, self._written_back, self.end - self._written_back)
            self._written_back = self.end

    def _twin(self, fd: int, chunk: EncodedChunk) -> int | None:
        """Return the offset of the same chunk of the previous record; None if it differs."""
        encoded, known = chunk.encoded, self._previous.get(chunk.ordinal)
        if known is None or known[:2] != (encoded.nbytes, encoded.crc):
            return None
        return known[2] if os.pread(fd, known[0], known[2]) == b"".join(encoded.parts) else None

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes of a chunk that is already written."""
        return os.pread(self._files.get(self.path), nbytes, offset)

    @property
    def finished(self) -> Path:
        """The file that `rename` gives the final name: the `.partial`, or its compact copy."""
        return self._compact or self.path

    def write_index(self, slots: int, *, is_last: bool) -> None:
        """Write the sharding index after the frames. Many replaced chunks are left out, in a copy of the file.

        The `.partial` keeps them, because readers know its places. While ranks capture (not `is_last`) the shard keeps
        them, too: a plain reader opens it once for the index and once for a chunk, and may meet two files.
        """
        self._compact, self.kept = None, []
        if is_last and self.replaced_nbytes * _WORTH_A_COPY > self.end:
            copy = self.path.with_name(f"{self.path.stem}-compact.tmp")
            compacted = compact(self._files.get(self.path), copy, self.index, self.end)
            if compacted is not None:
                with opened(copy, os.O_RDWR) as target:
                    pwrite_all(target, [index_bytes(compacted.places, slots)], compacted.end)
                self._compact, self.kept = copy, compacted.kept
                failpoint("compact.after_copy")
                return
        fd = self._files.get(self.path)
        end = pwrite_all(fd, [index_bytes(self.index, slots)], self.end)
        truncate(fd, end)

    def rename(self, target: Path) -> None:
        """Give the indexed file its final name. The `.partial` of a compact copy stays until `drop_partial`.

        Raises:
            StoreError: The name belongs to a shard that this file does not continue. Both files are kept.
        """
        if target.exists() and not self.replaces:
            raise StoreError(f"{target} already exists, and {self.path} does not continue it; both are kept")
        if self._compact is None:
            self._files.forget(self.path)
        else:
            # If a later step fails, the seal is repeated.
            self.replaces = True
        rename(self.finished, target)

    def drop_partial(self) -> None:
        """Delete the `.partial` whose compact copy has the final name, durably."""
        if self._compact is not None:
            failpoint("compact.before_delete")
            self.discard()

    def discard(self) -> None:
        """Delete a file without records."""
        self._files.forget(self.path)
        unlink(self.path, missing_ok=True)


def _replaced_nbytes(index: Mapping[int, tuple[int, int]], end: int, records: int) -> int:
    """Return how many bytes before `end` are surely replaced chunks. The COMMITs are only estimated, as too large."""
    return max(0, end - sum(nbytes for _, nbytes in set(index.values())) - _COMMIT_NBYTES * (records + 1))


def _index_and_end(fd: int, slots: int, records: int) -> tuple[dict[int, tuple[int, int]], int]:
    """Return the index of a sealed shard and its offset; from the frames if the index is damaged.

    slots: the number of entries in its index. records: the number after its last record.

    Raises:
        DamagedRecord: The index is damaged, and the frames do not cover all records.
    """
    try:
        return read_index(fd, slots), os.fstat(fd).st_size - index_nbytes(slots)
    except DamagedRecord:
        scanned = read_shard(fd)
        if scanned is None:
            raise
        if scanned.covering(records) != scanned.index:
            raise DamagedRecord(
                "the shard lost its index and a COMMIT; `capd verify RUN --repair -o NEW` saves the other records"
            ) from None
        return scanned.index, scanned.end
