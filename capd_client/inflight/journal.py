"""The journal in a rank's arena: which slots are ready, so that their captures outlive the rank.

A capture gets a cell when its bytes are in its slot, and loses it when it is settled. Whatever ends the process in
between, the daemon has the arena mapped, reads the cells once the process is gone, and takes each as if it had been
sent (`capd.server.rank.left_behind`). Writing one takes no lock and makes no system call.

A capture for which no cell is free is captured all the same: only its rank's death would cost it.
"""

from __future__ import annotations

import struct
from typing import Any, Optional

import msgspec

from capd_client.inflight.capture import COPYING, Capture
from capd_client.protocol.counter_page import PAGE_NBYTES
from capd_client.protocol.journal_layout import (
    CELL_NBYTES,
    DEFINITIONS_NBYTES,
    JOURNAL_CELLS,
    JOURNAL_DEFINED_NBYTES,
    JOURNAL_LARGE,
    JOURNAL_START,
    JOURNAL_USED_CELLS,
    JOURNAL_USED_LARGE,
    LARGE_NBYTES,
    MAX_USUAL_NDIM,
    USUAL_WORDS,
    WORD_NBYTES,
    JournalLayout,
    cell_word,
    commit_word,
    padded,
)
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import Define, encode

__all__ = ["Journal"]

_ROOM = CELL_NBYTES - WORD_NBYTES
_LARGE_ROOM = LARGE_NBYTES - WORD_NBYTES
_AT_ONCE = 64  # cells that are brought into use together
_encode = msgspec.msgpack.Encoder().encode


class _Cells:
    """Cells of one size, as words. Those used last are used next, so that few pages are touched.

    write: puts a descriptor and, behind it, the commit word into a cell.
    """

    __slots__ = ("_at", "_count", "_used_word", "_words", "_words_per_cell", "free", "used", "write")

    def __init__(self, words: memoryview, at: int, count: int, nbytes: int, used_word: int) -> None:
        self._words, self._at, self._words_per_cell = words, at // WORD_NBYTES, nbytes // WORD_NBYTES
        self._count, self._used_word = count, used_word
        self.free: list[memoryview] = []
        self.used = 0
        self.write = struct.Struct(f"={nbytes - WORD_NBYTES}sQ").pack_into

    def take(self, lock: Any) -> Optional[memoryview]:
        """A free cell, None where there is none."""
        while True:
            try:
                return self.free.pop()
            except IndexError:
                pass
            with lock:
                used, size = self.used, self._words_per_cell
                more = min(_AT_ONCE, self._count - used)
                if not more:
                    return None
                starts = [self._at + cell * size for cell in range(used + more - 1, used - 1, -1)]
                cells = [self._words[start : start + size] for start in starts]
                self.used = self._words[self._used_word] = used + more
                self.free += cells

    def restart(self) -> None:
        """Begin with the first cell: the views of many would stay for the life of the job."""
        self.free.clear()
        self.used = self._words[self._used_word] = 0


class Journal:
    """The cells and definitions of one arena; of none until `attach`. lock: the queue's."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._open = False
        self._bytes = memoryview(bytearray())
        self._words = self._bytes.cast("Q")
        self._layout = JournalLayout(0, 0)
        self._small = _Cells(self._words, 0, 0, CELL_NBYTES, JOURNAL_USED_CELLS)
        self._large = _Cells(self._words, 0, 0, LARGE_NBYTES, JOURNAL_USED_LARGE)
        self._free = self._small.free
        self._defined_nbytes = 0

    def attach(self, buffer: Any, layout: JournalLayout) -> None:
        """Begin, in an arena that is zero from its counter page to its slots."""
        with self._lock:
            self._bytes = memoryview(buffer).cast("B")
            self._words = words = self._bytes[: len(self._bytes) // 8 * 8].cast("Q")
            self._layout = layout
            self._small = _Cells(words, layout.cells_at, layout.cells, CELL_NBYTES, JOURNAL_USED_CELLS)
            self._large = _Cells(words, layout.large_at, layout.large, LARGE_NBYTES, JOURNAL_USED_LARGE)
            self._free = self._small.free
            self._defined_nbytes = 0
            words[JOURNAL_CELLS], words[JOURNAL_LARGE] = layout.cells, layout.large
            words[JOURNAL_START] = layout.end
            self._open = True

    def close(self) -> None:
        """Write nothing any more. What stands there stays, for the daemon."""
        self._open = False

    def restart(self) -> None:
        """Forget all cells, which nothing is in. With the lock held."""
        for cells in (self._small, self._large):
            cells.restart()

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
        cells = self._small if len(data) <= _ROOM else self._large
        cell = cells.take(self._lock) if len(data) <= _LARGE_ROOM else None
        if cell is not None:
            capture.cell = cell
            cells.write(cell, 0, data, cell_word(len(data), capture.descriptor.sequence))
            if capture.state != COPYING:  # given up by another thread, or a signal handler, meanwhile
                self.clear(capture)

    def keep_usual(self, capture: Capture, shape: tuple[int, ...], moment: Moment, flags: int) -> None:
        """`keep` of a whole CPU tensor without metadata, in C order, whose row the daemon computes. flags: USUAL ones.

        Word by word: the first capture after a pause finds cold caches, in which an encoder takes 8 µs.
        """
        whole_step = moment.sample_idx is moment.batch_idx is moment.sequence_idx is None
        if not whole_step or moment.recompute or len(shape) > MAX_USUAL_NDIM:
            self.keep(capture)
            return
        if capture.state != COPYING or not self._open:
            return
        try:
            cell = self._free.pop()  # as `take` does, without its call
        except IndexError:
            if (found := self._small.take(self._lock)) is None:
                return
            cell = found
        capture.cell = cell
        descriptor = capture.descriptor
        cell[0] = descriptor.sequence
        cell[1] = descriptor.offset
        cell[2] = descriptor.nbytes
        cell[3] = descriptor.key_id
        cell[4] = moment.iteration
        cell[5] = moment.micro_batch
        cell[6] = moment.call
        cell[7] = moment.attempt
        cell[8] = moment.time_ns
        axis = USUAL_WORDS
        for size in shape:
            cell[axis] = size
            axis += 1
        cell[-1] = flags | len(shape)  # last
        if capture.state != COPYING:  # as above
            self.clear(capture)

    def clear(self, capture: Capture) -> None:
        """The capture is settled: its slot may become another's. With the lock held, or by the capturing thread."""
        cell = capture.cell
        if cell is None or not self._open:
            return
        cell[-1] = 0
        capture.cell = None  # first: at worst, a signal handler's error costs a cell
        (self._small if len(cell) == CELL_NBYTES // WORD_NBYTES else self._large).free.append(cell)

    @property
    def lasting(self) -> list[tuple[int, int]]:
        """Offsets and sizes of what stays while nothing is in flight: the counter page, and the definitions."""
        return [(0, PAGE_NBYTES), (self._layout.definitions_at, self._defined_nbytes)]
