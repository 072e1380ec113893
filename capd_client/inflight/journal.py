"""The journal in a rank's arena: it lists the slots that are ready, so that their captures outlive the rank.

A capture gets a cell when its bytes are in its slot, and loses the cell when it is settled. The process may die in
between. The daemon has the arena mapped and reads the cells after the process is gone. It takes each capture as if
it had been sent (`capd.server.rank.rank`). Writing a cell takes no lock and makes no system call.

A capture is also taken if no cell is free. It is lost only if its rank dies.
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
# Cells that are brought into use together.
_AT_ONCE = 64
_encode = msgspec.msgpack.Encoder().encode


class _Cells:
    """The cells of one size, as words. The cell freed last is used next, so that few pages are touched.

    `write` puts a descriptor into a cell, and the commit word after it.
    """

    __slots__ = ("_at", "_count", "_used_word", "_words", "_words_per_cell", "free", "used", "write")

    def __init__(self, words: memoryview, at: int, count: int, nbytes: int, used_word: int) -> None:
        self._words, self._at, self._words_per_cell = words, at // WORD_NBYTES, nbytes // WORD_NBYTES
        self._count, self._used_word = count, used_word
        self.free: list[memoryview] = []
        self.used = 0
        self.write = struct.Struct(f"={nbytes - WORD_NBYTES}sQ").pack_into

    def take(self, lock: Any) -> Optional[memoryview]:
        """Return a free cell, or None if all cells are in use."""
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
        """Begin with the first cell again. Otherwise the views of many cells would stay for the life of the job."""
        self.free.clear()
        self.used = self._words[self._used_word] = 0


class Journal:
    """The cells and definitions of one arena. The journal has no arena before `attach`.

    Args:
        lock: The queue's lock.
    """

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
        """Begin in an arena whose bytes between the counter page and the slots are zero."""
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
        """Stop writing. The cells stay in the arena for the daemon."""
        self._open = False

    def restart(self) -> None:
        """Forget all cells. They must be empty, and the caller holds the lock."""
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
        """Write the cell of a capture whose bytes are in its slot. No effect on a capture that was given up."""
        if capture.state != COPYING or not self._open:
            return
        data = _encode(capture.descriptor)
        cells = self._small if len(data) <= _ROOM else self._large
        cell = cells.take(self._lock) if len(data) <= _LARGE_ROOM else None
        if cell is not None:
            capture.cell = cell
            cells.write(cell, 0, data, cell_word(len(data), capture.descriptor.sequence))
            # Another thread or a signal handler may have given the capture up in the meantime.
            if capture.state != COPYING:
                self.clear(capture)

    def keep_usual(self, capture: Capture, shape: tuple[int, ...], moment: Moment, flags: int) -> None:
        """Do the same as `keep`, for a whole CPU tensor in C order without metadata, whose row the daemon computes.

        The cell is written word by word. An encoder takes 8 µs with the cold caches of the first capture after a pause.

        Args:
            capture: The capture.
            shape: The tensor's shape.
            moment: The capture's moment.
            flags: The USUAL bits of `capd_client.protocol.journal_layout`.
        """
        whole_step = moment.sample_idx is moment.batch_idx is moment.sequence_idx is None
        if not whole_step or moment.recompute or len(shape) > MAX_USUAL_NDIM:
            self.keep(capture)
            return
        if capture.state != COPYING or not self._open:
            return
        try:
            # The same as in `take`, without the call.
            cell = self._free.pop()
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
        # The commit word comes last: a reader ignores a cell without it.
        cell[-1] = flags | len(shape)
        # As in `keep`.
        if capture.state != COPYING:
            self.clear(capture)

    def clear(self, capture: Capture) -> None:
        """Free the cell of a settled capture, whose slot may then go to another capture.

        The caller holds the lock, or is the capturing thread.
        """
        cell = capture.cell
        if cell is None or not self._open:
            return
        cell[-1] = 0
        # Before the cell is free again: an error of a signal handler then costs at most one cell.
        capture.cell = None
        (self._small if len(cell) == CELL_NBYTES // WORD_NBYTES else self._large).free.append(cell)

    @property
    def lasting(self) -> list[tuple[int, int]]:
        """The offset and size of each area that stays while nothing is in flight: counter page and definitions."""
        return [(0, PAGE_NBYTES), (self._layout.definitions_at, self._defined_nbytes)]
