"""Policy `stats`: where a tensor finds no room its statistics are kept instead, computed by the capturing thread."""

from __future__ import annotations

from threading import get_ident
from typing import Any, Optional

import torch

from capd_client.books import Books
from capd_client.counter_page import DropReason
from capd_client.definitions import Definition
from capd_client.devstats import fill_row
from capd_client.in_flight import Capture
from capd_client.protocol import Descriptor
from capd_client.statistics_row import NO_ROW_DTYPES, ROW_NBYTES, ROW_VALUES

__all__ = ["ReducingBooks", "write_row"]

_REDUCIBLE = frozenset({DropReason.ARENA_FULL, DropReason.STEP_BUDGET, DropReason.TOO_LARGE})


class ReducingBooks(Books):
    """Books that turn an offer without room into one of a statistics row: `row_offset` says that it is one.

    A row is small enough to find a place nearly always; where it does not, and for 64-bit integers, whose statistics no
    row holds, the offer is dropped as ever. Rows do not count against `max_mb_per_step`.
    """

    def _no_room(
        self, definition: Definition, descriptor: Descriptor, reason: DropReason
    ) -> Optional[Capture]:
        reducible = reason in _REDUCIBLE and _has_row(definition)
        slot = self.slots.take(ROW_NBYTES) if reducible else None
        if slot is None:
            return super()._no_room(definition, descriptor, reason)
        descriptor.nbytes, descriptor.payload, descriptor.row_offset = 0, False, slot[0]
        try:
            return self._enter(Capture(descriptor, definition, slot, thread=get_ident()))
        except BaseException:  # a signal handler's
            if not descriptor.sequence:
                self.waiting.give(slot)
            raise

    def reduce(self, capture: Capture) -> bool:
        """The row takes the place of the payload, where that is not smaller."""
        if capture.slot[1] < ROW_NBYTES or not _has_row(capture.definition):
            return False
        descriptor = capture.descriptor
        descriptor.nbytes, descriptor.payload, descriptor.row_offset = 0, False, descriptor.offset
        with self.lock:
            self._give_back(capture, capture.budgeted)
        return True


def _has_row(definition: Definition) -> bool:
    return definition.define.dtype not in NO_ROW_DTYPES


def write_row(buffer: Any, source: torch.Tensor, dtype: torch.dtype, offset: int) -> None:
    """Write the statistics of a CPU tensor, as `dtype`, to `offset` of the arena's `buffer`."""
    fill_row(source, torch.frombuffer(buffer, dtype=torch.float64, count=ROW_VALUES, offset=offset), dtype)
