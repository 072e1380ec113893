"""The journal in a rank's arena: which slots are ready, so that their captures outlive the rank.

A capture gets a cell when its bytes are in its slot, and loses it when it is settled. Whatever ends the process in
between, the daemon has the arena mapped, reads the cells once the process is gone, and takes each as if it had been
sent (`capd.server.recovery`). Writing one takes no lock and makes no system call.

A capture for which no cell is free is captured all the same: only its rank's death would cost it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from capd_client.counter_page import PAGE_NBYTES
from capd_client.in_flight import COPYING, Capture
from capd_client.journal_layout import (
    CELL_NBYTES,
    DEFINITIONS_NBYTES,
    JOURNAL_CELLS,
    JOURNAL_DEFINED_NBYTES,
    JOURNAL_LARGE,
    JOURNAL_START,
    JOURNAL_USED_CELLS,
    JOURNAL_USED_LARGE,
    LARGE_NBYTES,
    WORD_NBYTES,
    JournalLayout,
    cell_word,
    commit_word,
    padded,
)
from capd_client.protocol import Define, encode

__all__ = ["Journal"]

_ROOM = CELL_NBYTES - WORD_NBYTES
_LARGE_ROOM = LARGE_NBYTES - WORD_NBYTES
_AT_ONCE = 64  # cells that are brought into use together
_encode = msgspec.msgpack.Encoder().encode


class _Cells:
    """Cells of one size. Those used last are used next, so that few pages are touched."""

    __slots__ = ("_at", "_count", "_nbytes", "_used_word", "free", "used")

    def __init__(self, at: int, count: int, nbytes: int, used_word: int) -> None:
        self._at, self._count, self._nbytes, self._used_word = at, count, nbytes, used_word
        self.free: list[int] = []
        self.used = 0

    def take(self, words: memoryview, lock: Any) -> int:
        """Offset of a free cell, 0 where there is none."""
        while True:
            try:
                return self.free.pop()
            except IndexError:
                pass
            with lock:
                used = self.used
                more = min(_AT_ONCE, self._count - used)
                if not more:
                    return 0
                cells = [self._at + cell * self._nbytes for cell in range(used + more - 1, used - 1, -1)]
                self.used = words[self._used_word] = used + more
                self.free += cells


class Journal:
    """The cells and definitions of one arena; of none until `attach`. lock: the books'."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._open = False
        self._bytes = memoryview(bytearray())
        self._words = self._bytes.cast("Q")
        self._layout = JournalLayout(0, 0)
        self._small = _Cells(0, 0, CELL_NBYTES, JOURNAL_USED_CELLS)
        self._large = _Cells(0, 0, LARGE_NBYTES, JOURNAL_USED_LARGE)
        self._free = self._small.free
        self._defined_nbytes = 0

    def attach(self, buffer: Any, layout: JournalLayout) -> None:
        """Begin, in an arena that is zero from its counter page to its slots."""
        with self._lock:
            self._bytes = memoryview(buffer).cast("B")
            self._words = words = self._bytes[: len(self._bytes) // 8 * 8].cast("Q")
            self._layout = layout
            self._small = _Cells(layout.cells_at, layout.cells, CELL_NBYTES, JOURNAL_USED_CELLS)
            self._large = _Cells(layout.large_at, layout.large, LARGE_NBYTES, JOURNAL_USED_LARGE)
            self._free = self._small.free
            self._defined_nbytes = 0
            words[JOURNAL_CELLS], words[JOURNAL_LARGE] = layout.cells, layout.large
            words[JOURNAL_START] = layout.end
            self._open = True

    def close(self) -> None:
        """Write nothing any more. What stands there stays, for the daemon."""
        self._open = False

    def define(self, define: Define) -> None:
        """Add a definition, before the first capture that names it."""
        with self._lock:
            data = encode(define)
            at = self._layout.definitions_at + self._defined_nbytes
            after = self._defined_nbytes + padded(WORD_NBYTES + len(data))
            if not self._open or after > DEFINITIONS_NBYTES:
                return
            self._bytes[at + WORD_NBYTES : at + WORD_NBYTES + len(data)] = data
            self._words[at // WORD_NBYTES] = commit_word(data)
            self._words[JOURNAL_DEFINED_NBYTES] = self._defined_nbytes = after

    def keep(self, capture: Capture) -> None:
        """The bytes of a capture are in its slot, and it is about to be ready. No effect on one that was given up."""
        if capture.state != COPYING or not self._open:
            return
        data = _encode(capture.descriptor)
        nbytes = len(data)
        if nbytes <= _ROOM:
            try:
                at = self._free.pop()
            except IndexError:
                at = self._small.take(self._words, self._lock)
            if at:
                capture.cell = at
                self._bytes[at : at + nbytes] = data
                # Last, and `cell_word` written out: a checksum would bring a library's code into cold caches.
                sequence = capture.descriptor.sequence & 0xFFFF_FFFF
                self._words[(at + _ROOM) // WORD_NBYTES] = nbytes | sequence << 32
        else:
            self._keep_large(capture, data)
        if capture.state != COPYING:  # given up by another thread, or a signal handler, meanwhile
            self.clear(capture)

    def _keep_large(self, capture: Capture, data: bytes) -> None:
        at = self._large.take(self._words, self._lock) if len(data) <= _LARGE_ROOM else 0
        if at:
            capture.cell = at
            self._bytes[at : at + len(data)] = data
            word = cell_word(len(data), capture.descriptor.sequence)
            self._words[(at + _LARGE_ROOM) // WORD_NBYTES] = word

    def clear(self, capture: Capture) -> None:
        """The capture is settled: its slot may become another's. With the lock held, or by the capturing thread."""
        at = capture.cell
        if not at or not self._open:
            return
        large = at >= self._layout.large_at
        room = _LARGE_ROOM if large else _ROOM
        self._words[(at + room) // WORD_NBYTES] = 0
        capture.cell = 0  # first: at worst, a signal handler's error costs a cell
        (self._large if large else self._small).free.append(at)

    @property
    def lasting(self) -> list[tuple[int, int]]:
        """Offsets and sizes of what stays while nothing is in flight: the counter page, and the definitions."""
        return [(0, PAGE_NBYTES), (self._layout.definitions_at, self._defined_nbytes)]

    @property
    def cells(self) -> tuple[int, int]:
        """Small and large cells in use."""
        small, large = self._small, self._large
        return small.used - len(small.free), large.used - len(large.free)
