"""The layout of an arena's journal, and the meaning of its words. No I/O, no torch.

The journal follows the counter page and precedes the slots. It has three parts: small cells, large cells, definitions.
All of it is sparse memory: only the used part takes pages. Words of the counter page hold its size and how much was
ever used, so a reader never looks at the rest.

A cell starts with one descriptor. Its last 8 bytes are its commit word. The word is written after the descriptor, and
set to 0 before the cell's slot is reused.

A descriptor is message-packed. The descriptor of a usual capture is a list of words instead: sequence, offset, size,
key id, iteration, micro-batch, call, attempt, time, and the shape. The commit word distinguishes the two. For a
message-packed descriptor, its low half is the length and its high half the low half of the sequence. For a usual
capture it is USUAL with flags and the number of axes.

A definition is a commit word, followed by one DEF message, padded to 8 bytes. Definitions are only ever added.
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

# The pages of slots are allocated and page-locked in multiples of this, so the slots begin at a multiple.
STEP_NBYTES = 32 << 20
WORD_NBYTES = 8
# A message-packed descriptor takes 40 to 90 bytes.
CELL_NBYTES = 128
# A descriptor with the most metadata allowed takes less than 5 KiB.
LARGE_NBYTES = 8192
# As much as one connection may define (`capd.server.rank.session.MAX_DEFINE_NBYTES`).
DEFINITIONS_NBYTES = 64 << 20
MIN_CELLS, MAX_CELLS = 4096, 1 << 20
MIN_LARGE, MAX_LARGE = 64, 4096
# Bytes of slots for each small cell.
_NBYTES_PER_CELL = 1024

# The commit word of a usual capture. No message-packed descriptor is that long. Python is fastest below 2^30.
USUAL = 1 << 28
# The bits that hold the number of axes.
USUAL_NDIM = 0xFF
USUAL_REQUIRES_GRAD, USUAL_IS_LEAF, USUAL_STATISTICS, USUAL_NO_PAYLOAD = 1 << 8, 1 << 9, 1 << 10, 1 << 11
# The words before those of the shape.
USUAL_WORDS = 9
MAX_USUAL_NDIM = CELL_NBYTES // WORD_NBYTES - 1 - USUAL_WORDS

_CELLS_PER_LARGE = 64

# Words of the counter page. JOURNAL_START holds the start of the slots; 0 if the arena has no journal.
JOURNAL_START, JOURNAL_CELLS, JOURNAL_LARGE = 264, 265, 266
JOURNAL_USED_CELLS, JOURNAL_USED_LARGE, JOURNAL_DEFINED_NBYTES = 267, 268, 269


@dataclass(frozen=True)
class JournalLayout:
    """A journal with this many small and large cells, and the offsets of its three parts in the arena."""

    cells: int
    large: int

    @property
    def cells_at(self) -> int:
        """The offset of the first small cell."""
        return PAGE_NBYTES

    @property
    def large_at(self) -> int:
        """The offset of the first large cell."""
        return self.cells_at + self.cells * CELL_NBYTES

    @property
    def definitions_at(self) -> int:
        """The offset of the first definition."""
        return self.large_at + self.large * LARGE_NBYTES

    @property
    def end(self) -> int:
        """The offset after the journal, where the slots begin."""
        end = self.definitions_at + DEFINITIONS_NBYTES
        return -(-end // STEP_NBYTES) * STEP_NBYTES


def layout_for(slots_nbytes: int) -> JournalLayout:
    """Return the journal of an arena with `slots_nbytes` bytes of slots; its parts are whole pages."""
    cells = max(MIN_CELLS, min(MAX_CELLS, slots_nbytes // _NBYTES_PER_CELL // 64 * 64))
    return JournalLayout(cells, max(MIN_LARGE, min(MAX_LARGE, cells // _CELLS_PER_LARGE)))


def cell_word(nbytes: int, sequence: int) -> int:
    """Return the commit word of a cell: the descriptor's length and the low 32 bits of its sequence."""
    return nbytes | (sequence & 0xFFFF_FFFF) << 32


def commit_word(data: bytes) -> int:
    """Return the commit word of a definition: its length and its CRC-32."""
    return len(data) | zlib.crc32(data) << 32


def word_fits(word: int, data: bytes) -> bool:
    """Whether the word was written for `data`."""
    return word == commit_word(data)


def padded(nbytes: int) -> int:
    """Round a number of bytes up to whole words."""
    return -(-nbytes // WORD_NBYTES) * WORD_NBYTES
