"""Walks a journal and skips damage: yields frames, and the byte ranges between them without an intact frame."""

from __future__ import annotations

import os
from collections.abc import Iterator

from capd.store.format.frames import FRAME_NBYTES, Frame, FrameKind, frame, parse_frame, read_frame

__all__ = ["pieces"]

_MAGIC = frame(FrameKind.HEADER, b"")[:4]
_BLOCK_NBYTES = 1 << 20


def pieces(fd: int, offset: int, end: int) -> Iterator[Frame | tuple[int, int]]:
    """Yield frames from `offset` on, and the byte ranges [start, end) without an intact frame."""
    while offset < end:
        found = read_frame(fd, offset, end)
        if found is None or found.kind is FrameKind.HEADER:
            following = None if found is not None else _search(fd, offset + 1, end)
            yield (offset, end if following is None else following)
            if following is None:
                return
            offset = following
        else:
            yield found
            offset = found.offset + found.nbytes


def _search(fd: int, offset: int, end: int) -> int | None:
    """Return the offset of the next intact frame header."""
    while end - offset >= FRAME_NBYTES:
        block = os.pread(fd, min(_BLOCK_NBYTES, end - offset), offset)
        at = block.find(_MAGIC)
        while 0 <= at <= len(block) - FRAME_NBYTES:
            found = parse_frame(block, at)
            if found is not None and offset + found.offset + found.nbytes <= end:
                return offset + at
            at = block.find(_MAGIC, at + 1)
        if len(block) < FRAME_NBYTES:
            return None
        offset += len(block) - FRAME_NBYTES + 1
    return None
