"""The journal in the arena of a rank that is gone: the descriptors of its ready slots, and their definitions.

All of it was written by another process. An entry is used only if its commit word shows that it is complete and if it
decodes as a type of the protocol. It is then checked like a PUT or a DEF. All other entries are skipped, and their
captures count as lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

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
    MAX_CELLS,
    MAX_LARGE,
    MAX_USUAL_NDIM,
    USUAL,
    USUAL_IS_LEAF,
    USUAL_NDIM,
    USUAL_NO_PAYLOAD,
    USUAL_REQUIRES_GRAD,
    USUAL_STATISTICS,
    USUAL_WORDS,
    WORD_NBYTES,
    JournalLayout,
    cell_word,
    padded,
    word_fits,
)
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import MAX_BATCH, MAX_FRAME_NBYTES, Define, Descriptor, decode_client

__all__ = ["FoundCells", "Journal"]

# Every definition then fits in one block.
_BLOCK_NBYTES = 2 * MAX_FRAME_NBYTES
_LENGTH = (1 << 32) - 1

_descriptors = msgspec.msgpack.Decoder(Descriptor)
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class FoundCells:
    """The cells that hold a descriptor.

    The descriptors themselves are read again at their turn, because a million of them would take a gigabyte here.

    Attributes:
        places: One row per cell: sequence, offset in the arena, size in bytes. The rows ascend by sequence.
        keys: The key ids of the descriptors.
    """

    places: NDArray[np.int64]
    keys: set[int]


class Journal:
    """The journal of a rank, with its extent as of its opening. Every call reads the cells again."""

    def __init__(
        self, layout: JournalLayout, used: tuple[int, int, int], read: Callable[[int, int], bytes]
    ) -> None:
        """Prepare the reading. `used`: how many cells, large cells and bytes of definitions were ever used."""
        cells, large, self._defined_nbytes = used
        self._layout, self._read = layout, read
        # The place, the number and the size of the cells of each kind.
        self._cells = (layout.cells_at, cells, CELL_NBYTES), (layout.large_at, large, LARGE_NBYTES)

    @classmethod
    def of(cls, words: memoryview, arena_nbytes: int, read: Callable[[int, int], bytes]) -> Journal | None:
        """Return the journal that a counter page describes; None if the arena cannot hold it or it was never used.

        `words` is the page as 64-bit words. `read` returns bytes of the arena for an offset and a size.
        """
        start, cells, large = words[JOURNAL_START], words[JOURNAL_CELLS], words[JOURNAL_LARGE]
        if not 0 < cells <= MAX_CELLS or not 0 < large <= MAX_LARGE:
            return None
        layout = JournalLayout(cells, large)
        if start != layout.end or start > arena_nbytes:
            return None
        used_cells, used_large = min(words[JOURNAL_USED_CELLS], cells), min(words[JOURNAL_USED_LARGE], large)
        if not used_cells and not used_large:
            return None
        defined = min(words[JOURNAL_DEFINED_NBYTES], DEFINITIONS_NBYTES)
        return cls(layout, (used_cells, used_large, defined), read)

    def find(self) -> FoundCells:
        """Search all cells that were ever used."""
        tables, keys = [np.empty((0, 3), dtype=np.int64)], set[int]()
        for start, used, nbytes in self._cells:
            per_block = _BLOCK_NBYTES // nbytes
            for first in range(0, used, per_block):
                count = min(per_block, used - first)
                at = start + first * nbytes
                block = self._read(at, count * nbytes)
                words = np.frombuffer(block, dtype=np.uint64).reshape(count, -1)[:, -1]
                rows = []
                for index in np.flatnonzero(words).tolist():
                    item = _decoded(block[index * nbytes : (index + 1) * nbytes])
                    if item is not None:
                        rows.append((item.sequence, at + index * nbytes, nbytes))
                        keys.add(item.key_id)
                if rows:
                    tables.append(np.array(rows, dtype=np.int64))
        table = np.concatenate(tables)
        return FoundCells(table[np.argsort(table[:, 0], kind="stable")], keys)

    def batches(self, found: FoundCells) -> Iterator[list[Descriptor]]:
        """Yield the descriptors by ascending sequence, in batches of the size of one PUT. Each sequence comes once."""
        batch: list[Descriptor] = []
        previous = -1
        for _, at, nbytes in found.places:
            item = _decoded(self._read(int(at), int(nbytes)))
            if item is None or item.sequence <= previous:
                # The cell changed after `find`, which a sound rank that is gone cannot do.
                continue
            previous = item.sequence
            batch.append(item)
            if len(batch) == MAX_BATCH:
                yield batch
                batch = []
        if batch:
            yield batch

    def definitions(self, wanted: Set[int]) -> Iterator[tuple[Define, int]]:
        """Yield the wanted definitions and the bytes of each. The first definition that cannot be read ends them."""
        at, end = self._layout.definitions_at, self._layout.definitions_at + self._defined_nbytes
        while at + WORD_NBYTES <= end:
            block = self._read(at, min(_BLOCK_NBYTES, end - at))
            done = 0
            while (frame := _frame(block, done)) is not None:
                done += padded(WORD_NBYTES + len(frame))
                try:
                    define = decode_client(frame)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    return
                if isinstance(define, Define) and define.id in wanted:
                    yield define, len(frame)
            if not done:
                return
            at += done


def _decoded(cell: bytes) -> Descriptor | None:
    """Return the descriptor in a cell; None if it is incomplete or not a descriptor."""
    word = int.from_bytes(cell[-WORD_NBYTES:], sys.byteorder)
    usual, length = word & USUAL and not word >> 32, word & _LENGTH
    data = _usual(cell, length) if usual else cell[: min(length, len(cell) - WORD_NBYTES)]
    if not data:
        return None
    try:
        item = _descriptors.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return item if usual or word == cell_word(len(data), item.sequence) else None


def _usual(cell: bytes, flags: int) -> bytes:
    """Return the words of a usual capture as an encoded descriptor. Decoding it then checks every number."""
    ndim = flags & USUAL_NDIM
    if ndim > MAX_USUAL_NDIM:
        return b""
    words = np.frombuffer(cell, dtype=np.uint64)[: USUAL_WORDS + ndim].tolist()
    sequence, offset, nbytes, key_id, iteration, micro_batch, call, attempt, time_ns, *shape = words
    moment = Moment(iteration, micro_batch, call, attempt=attempt, time_ns=time_ns)
    return _encode(
        Descriptor(
            sequence,
            offset,
            nbytes,
            key_id,
            tuple(shape),
            moment,
            requires_grad=bool(flags & USUAL_REQUIRES_GRAD),
            is_leaf=bool(flags & USUAL_IS_LEAF),
            payload=not flags & USUAL_NO_PAYLOAD,
            statistics=bool(flags & USUAL_STATISTICS),
        )
    )


def _frame(block: bytes, at: int) -> bytes | None:
    """Return the definition's message at `at`; None if it is incomplete or does not fit in the block."""
    word = int.from_bytes(block[at : at + WORD_NBYTES], sys.byteorder)
    nbytes = word & _LENGTH
    if not 0 < nbytes <= MAX_FRAME_NBYTES:
        return None
    frame = block[at + WORD_NBYTES : at + WORD_NBYTES + nbytes]
    return frame if word_fits(word, frame) else None
