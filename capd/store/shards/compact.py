"""Copies a shard file without the chunks that later chunks replaced.

Small records share a chunk. When a run is continued, the records of a started chunk are encoded again together with the
new ones, and the older chunk has no reader any more. The copy holds each chunk that the index names, once, and one
COMMIT for all records of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from capd.store.disk.files import opened, pwrite_all
from capd.store.format.frames import FRAME_NBYTES, Commit, Frame, FrameKind, encode_commit, frame, session_of
from capd.store.scan.scan import CommitRun, ScannedShard, read_shard

__all__ = ["Compacted", "Kept", "compact"]

_PIECE_NBYTES = 8 << 20


class Kept(NamedTuple):
    """Records of one COMMIT in the copy: first, first+1, …, `records` of them.

    Attributes:
        nbytes: The bytes of the COMMIT and its chunks in the copy.
        before: The bytes of the same records in the source.
    """

    first: int
    records: int
    nbytes: int
    before: int


class Compacted(NamedTuple):
    """A compact copy.

    Attributes:
        places: The index entries: slot → (offset, bytes).
        end: The offset after the last frame.
        kept: The records whose bytes changed.
    """

    places: dict[int, tuple[int, int]]
    end: int
    kept: list[Kept]


def compact(fd: int, target: Path, index: Mapping[int, tuple[int, int]], end: int) -> Compacted | None:
    """Copy the frames before `end` of an open shard to the new file `target`, without replaced chunks.

    Returns:
        The copy; None without a copy if the file is damaged, or does not hold all chunks of `index`.

    Raises:
        OSError: A file cannot be read or written.
    """
    frames: dict[int, Frame] = {}
    scanned = read_shard(fd, visit=lambda _, chunk: frames.update({chunk.offset: chunk}))
    if (
        scanned is None
        or scanned.file is None
        or scanned.end != end
        or scanned.index != index
        or _damaged(scanned)
    ):
        return None
    with opened(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as copy:
        return _Copy(fd, copy, frames, index).of(scanned)


def _damaged(scanned: ScannedShard) -> bool:
    numbers = sorted(scanned.rows)
    gap = any(start < scanned.end for start, _ in scanned.gaps)
    return gap or not numbers or numbers != list(range(numbers[0], numbers[-1] + 1))


class _Copy:
    def __init__(
        self, source: int, target: int, frames: Mapping[int, Frame], index: Mapping[int, tuple[int, int]]
    ) -> None:
        self._source, self._target, self._frames = source, target, frames
        self._live = {offset for offset, _ in index.values()}
        # Offset of a chunk in the source → its offset in the copy.
        self._moved: dict[int, int] = {}
        self._end = 0
        self._kept: list[Kept] = []

    def of(self, scanned: ScannedShard) -> Compacted:
        first = min(self._frames, default=scanned.end) - FRAME_NBYTES
        self._copy(0, min([first, *(run.start for run in scanned.runs)]))
        waiting: list[CommitRun] = []
        for run in scanned.runs:
            if all(offset in self._live for _, offset, _ in run.commit.chunks):
                self._append([*waiting, run])
                waiting = []
            else:
                waiting.append(run)
        index = {slot: (self._moved[offset], nbytes) for slot, (offset, nbytes) in scanned.index.items()}
        return Compacted(index, self._end, self._kept)

    def _append(self, runs: list[CommitRun]) -> None:
        """Append the chunks of the last run, and one COMMIT for the records of all."""
        begin = self._end
        commit: Commit = runs[-1].commit
        for _, offset, nbytes in commit.chunks:
            # A chunk that equals the one of the record before it is stored once.
            if offset not in self._moved:
                self._moved[offset] = self._end + FRAME_NBYTES
                self._copy(offset - FRAME_NBYTES, offset + nbytes)
        first = runs[0].commit.first
        rows = [row for run in runs for row in run.commit.rows]
        chunks = [(slot, self._moved[offset], nbytes) for slot, offset, nbytes in commit.chunks]
        payload = encode_commit(first, rows, chunks)
        head = frame(FrameKind.COMMIT, payload, session=session_of(rows[0].client), sequence=rows[0].sequence)
        self._end = pwrite_all(self._target, [head, payload], self._end)
        before = sum(run.end - run.start for run in runs)
        if self._end - begin != before:
            self._kept.append(Kept(first, len(rows), self._end - begin, before))

    def _copy(self, start: int, end: int) -> None:
        while start < end:
            piece = os.pread(self._source, min(_PIECE_NBYTES, end - start), start)
            if not piece:
                raise OSError(f"the shard ends at {start} while it is copied")
            self._end = pwrite_all(self._target, [piece], self._end)
            start += len(piece)
