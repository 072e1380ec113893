"""Where the journal of an arena lies, and what its words mean. Layout only; no I/O, no torch.

The journal stands behind the counter page, in front of the slots: small cells, large cells, definitions. All of it is
sparse memory, of which only what was used takes pages. Words of the counter page say how much there is and how much
was ever used, so that a reader never looks at the rest. A cell holds one descriptor from its front, and in its last 8
bytes its commit word, written behind the descriptor and set to 0 before the cell's slot is given to anybody else.

The descriptor is message-packed, or, of a usual capture, in words: sequence, offset, size, key id, iteration,
micro-batch, call, attempt, time, and the shape. The commit word says which. Of a message-packed one its low half is the
length, its high half the low half of the sequence. Of a usual one it is USUAL with flags and the number of axes.

A definition is its commit word, then one DEF message, padded to 8 bytes; they are only ever added.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from capd_client.protocol.counter_page import PAGE_NBYTES

__all__ = [
    "CELL_NBYTES", "DEFINITIONS_NBYTES", "JOURNAL_CELLS", "JOURNAL_DEFINED_NBYTES", "JOURNAL_LARGE", "JOURNAL_START",
    "JOURNAL_USED_CELLS", "JOURNAL_USED_LARGE", "LARGE_NBYTES", "MAX_CELLS", "MAX_LARGE", "MAX_USUAL_NDIM",
    "STEP_NBYTES", "USUAL", "USUAL_IS_LEAF", "USUAL_NDIM", "USUAL_NO_PAYLOAD", "USUAL_REQUIRES_GRAD",
    "USUAL_STATISTICS", "USUAL_WORDS", "WORD_NBYTES",
    "JournalLayout", "cell_word", "commit_word", "layout_for", "padded", "word_fits",
]  # fmt: skip

STEP_NBYTES = (
    32 << 20
)  # slots get their pages, and are page-locked, in multiples of this; so they begin at one
WORD_NBYTES = 8
CELL_NBYTES = 128  # a message-packed descriptor takes 40 to 90 bytes
LARGE_NBYTES = 8192  # one with as much metadata as there may be takes less than 5 KiB
DEFINITIONS_NBYTES = 64 << 20  # what one connection may define (`capd.server.rank.session.MAX_DEFINE_NBYTES`)
MIN_CELLS, MAX_CELLS = 4096, 1 << 20
MIN_LARGE, MAX_LARGE = 64, 4096
_NBYTES_PER_CELL = 1024  # of slots

# A usual capture's commit word. No message-packed descriptor is so long. Python is fastest with numbers below 2^30.
USUAL = 1 << 28
USUAL_NDIM = 0xFF  # the bits that hold the number of axes
USUAL_REQUIRES_GRAD, USUAL_IS_LEAF, USUAL_STATISTICS, USUAL_NO_PAYLOAD = 1 << 8, 1 << 9, 1 << 10, 1 << 11
USUAL_WORDS = 9  # before those of the shape
MAX_USUAL_NDIM = CELL_NBYTES // WORD_NBYTES - 1 - USUAL_WORDS

_CELLS_PER_LARGE = 64

# Words of the counter page. JOURNAL_START: where the slots begin; 0 where the arena has no journal.
JOURNAL_START, JOURNAL_CELLS, JOURNAL_LARGE = 264, 265, 266
JOURNAL_USED_CELLS, JOURNAL_USED_LARGE, JOURNAL_DEFINED_NBYTES = 267, 268, 269


@dataclass(frozen=True)
class JournalLayout:
    """A journal of so many cells, and where its three parts lie in the arena."""

    cells: int
    large: int

    @property
    def cells_at(self) -> int:
        """The first small cell."""
        return PAGE_NBYTES

    @property
    def large_at(self) -> int:
        """The first large cell."""
        return self.cells_at + self.cells * CELL_NBYTES

    @property
    def definitions_at(self) -> int:
        """The first definition."""
        return self.large_at + self.large * LARGE_NBYTES

    @property
    def end(self) -> int:
        """After all of it: where the slots begin."""
        end = self.definitions_at + DEFINITIONS_NBYTES
        return -(-end // STEP_NBYTES) * STEP_NBYTES


def layout_for(slots_nbytes: int) -> JournalLayout:
    """The journal of an arena with so many bytes of slots; whole pages."""
    cells = max(MIN_CELLS, min(MAX_CELLS, slots_nbytes // _NBYTES_PER_CELL // 64 * 64))
    return JournalLayout(cells, max(MIN_LARGE, min(MAX_LARGE, cells // _CELLS_PER_LARGE)))


def cell_word(nbytes: int, sequence: int) -> int:
    """What says that a cell holds this sequence's descriptor: its length, and the sequence's low 32 bits."""
    return nbytes | (sequence & 0xFFFF_FFFF) << 32


def commit_word(data: bytes) -> int:
    """What says that a definition is all there: its length, and its checksum."""
    return len(data) | zlib.crc32(data) << 32


def word_fits(word: int, data: bytes) -> bool:
    """Whether `data` is what the word was written for."""
    return word == commit_word(data)


def padded(nbytes: int) -> int:
    """So many bytes, rounded up to whole words."""
    return -(-nbytes // WORD_NBYTES) * WORD_NBYTES
