"""Books that take a tensor larger than the arena in, too: as a record whose bytes travel in parts (policy block).

The record is offered, in flight and committed or dropped once, like any capture, but never sent itself. Its parts
have slots and sequences of their own; an ACK of a part frees its slot, that of the last one commits the record, and
a NACK of any of them drops it. What was given up while parts of it are with the daemon is taken back by a part
without bytes, which is sent, and sent again, as any other is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from threading import get_ident
from typing import Optional

from msgspec.structs import replace

from capd_client.allocator import EMPTY, GRANULE_NBYTES, Slot, SlotAllocator
from capd_client.books import Books
from capd_client.counter_page import DROP_REASONS, DropReason
from capd_client.counting import Counters
from capd_client.definitions import Definition
from capd_client.in_flight import ABORTED, COPYING, READY, Capture
from capd_client.protocol import Descriptor, NackRow, Part

__all__ = ["PartCapture", "PartedBooks", "Record", "part_nbytes"]

_MAX_PART_NBYTES = 64 << 20


def part_nbytes(arena_nbytes: int) -> int:
    """The most that one part takes of slots of `arena_nbytes`: a quarter, so that the next one is copied while the
    daemon works on those before; at most 64 MiB, whole granules."""
    return max(GRANULE_NBYTES, min(_MAX_PART_NBYTES, arena_nbytes // 4 // GRANULE_NBYTES * GRANULE_NBYTES))


class Record(Capture):
    """A capture that goes in parts. It has no slot; it is COPYING until its last part is cut.

    patience_s: what is left of the time that it may wait. cut_nbytes: bytes in parts so far. dropped: why it was given
    up or refused.
    """

    patience_s: float = 0.0
    cut_nbytes: int = 0
    dropped: Optional[DropReason] = None


class PartCapture(Capture, kw_only=True):
    """One part on its way. It outlives a dropped record for as long as somebody may write or read its slot."""

    record: Record


class PartedBooks(Books):
    """Books under policy block; `max_block_s` is the longest that one record may wait, over all its parts."""

    def __init__(
        self,
        slots: SlotAllocator,
        counters: Counters,
        *,
        max_block_s: float,
        step_nbytes: Optional[int] = None,
    ) -> None:
        super().__init__(slots, counters, max_block_s=max_block_s, step_nbytes=step_nbytes)
        self.part_nbytes = part_nbytes(slots.capacity)
        # By sequence, ascending: every part that owns a slot.
        self._pieces: dict[int, PartCapture] = {}

    # -- the training thread's side -------------------------------------------------------------------

    def _no_room(
        self, definition: Definition, descriptor: Descriptor, reason: DropReason
    ) -> Optional[Capture]:
        """Takes what is too large in as a Record."""
        nbytes, iteration = descriptor.nbytes, descriptor.moment.iteration
        if reason is DropReason.TOO_LARGE and not self.step_budget.has_room(iteration, nbytes):
            reason = DropReason.STEP_BUDGET
        if reason is not DropReason.TOO_LARGE:
            return super()._no_room(definition, descriptor, reason)
        self.step_budget.take(iteration, nbytes)
        record = Record(
            descriptor, definition, EMPTY, budgeted=nbytes, thread=get_ident(), patience_s=self.waiting.max_s
        )
        return self._enter(record, queued=False)

    def cut(self, record: Record, nbytes: int) -> Optional[PartCapture]:
        """A slot, a sequence and a place in the queue for the record's next `nbytes`.

        Waits for room while the record has patience; then it is dropped. None if it is, for whatever reason.
        """
        slot: Optional[Slot] = None
        piece: Optional[PartCapture] = None
        try:
            with self.lock:
                if record.state == ABORTED:
                    return None
                slot = self.slots.take(nbytes)
                if slot is None:
                    began = time.monotonic()
                    slot = self.waiting.take(nbytes, record.patience_s)
                    record.patience_s -= time.monotonic() - began
                if record.state == ABORTED:  # refused during the wait, or everything was closed
                    if slot is not None:
                        self.slots.give(slot)
                        slot = None
                        self.waiting.given()
                    return None
                if slot is None:
                    self._give_up(record, DropReason.ARENA_FULL)
                    return None
                piece = self._add_piece(record, nbytes, slot)
                if record.cut_nbytes == record.descriptor.nbytes:
                    record.state = READY
                return piece
        except BaseException:  # a signal handler's
            with self.lock:
                if piece is not None:
                    self._let_go(piece)
                elif slot is not None:
                    self.waiting.give(slot)
            raise

    def ready(self, capture: Capture) -> None:
        with self.lock:
            super().ready(capture)
            if isinstance(capture, PartCapture) and capture.record.state == ABORTED:
                self._let_go(capture)

    def abort(self, capture: Capture, reason: DropReason) -> None:
        with self.lock:
            record = capture.record if isinstance(capture, PartCapture) else capture
            if not isinstance(record, Record):
                super().abort(capture, reason)
                return
            self._give_up(record, reason)
            if isinstance(capture, PartCapture) and capture.state == COPYING:
                self._let_go(capture)

    def abandon(self, capture: Capture, reason: DropReason) -> None:
        with self.lock:
            if isinstance(capture, PartCapture) and capture.state == COPYING:
                capture.slot = (capture.slot[0], 0, None)
                self.abort(capture, reason)
            else:
                super().abandon(capture, reason)

    # -- the client thread's side ---------------------------------------------------------------------

    def reconnected(self) -> None:
        with self.lock:
            super().reconnected()
            if self._pieces:
                sent = [*self._resend, *(piece for piece in self._pieces.values() if piece.sent)]
                self._resend = deque(sorted(sent, key=lambda capture: capture.descriptor.sequence))

    def acknowledged(self, ranges: Iterable[tuple[int, int]]) -> None:
        ranges = list(ranges)
        with self.lock:
            super().acknowledged(ranges)
            for piece in list(self._pieces.values()):
                sequence = piece.descriptor.sequence
                if not piece.sent or not any(first <= sequence <= last for first, last in ranges):
                    continue
                self._let_go(piece)
                if piece.descriptor.ends_record and piece.record.state != ABORTED:
                    self._commit(piece.record)

    def refused(self, rows: Iterable[NackRow]) -> None:
        rows = list(rows)
        with self.lock:
            super().refused(rows)
            for row in rows:
                piece = self._pieces.get(row.sequence)
                if piece is not None and piece.sent:
                    self._let_go(piece)
                    self._drop_record(piece.record, DROP_REASONS[row.reason])

    def close(self, reason: DropReason) -> int:
        with self.lock:
            lost = super().close(reason)
            for piece in list(self._pieces.values()):
                self.copying = self.copying or piece.state == COPYING
                if piece.state == READY:
                    piece.cell = None  # as in `Books.close`
                self._let_go(piece)
            return lost

    @property
    def busy(self) -> bool:
        """Whether anything is in flight, parts of dropped records among it."""
        return bool(self._live or self._pieces)

    # -- both, with the lock held ------------------------------------------------------------------------

    def _add_piece(self, record: Record, nbytes: int, slot: Slot) -> PartCapture:
        sequence, whole = self._last_sequence + 1, record.descriptor
        part = Part(whole.sequence, record.cut_nbytes, whole.nbytes)
        descriptor = replace(whole, sequence=sequence, offset=slot[0], nbytes=nbytes, part=part)
        piece = PartCapture(descriptor, record.definition, slot, thread=get_ident(), record=record)
        self._last_sequence = sequence
        self._pieces[sequence] = piece
        self._queue += (piece,)
        record.cut_nbytes += nbytes
        return piece

    def _give_up(self, record: Record, reason: DropReason) -> None:
        """Drop a record of our own accord: the daemon, which may hold parts of it, is told to let them go."""
        if record.state == ABORTED:
            return
        self._drop_record(record, reason)
        if record.cut_nbytes:
            self._add_piece(record, 0, EMPTY).state = READY

    def _drop_record(self, record: Record, reason: DropReason) -> None:
        """Count it, once; parts that nobody writes or reads give their slots back."""
        if record.state == ABORTED:
            return
        record.dropped = reason
        unsent = [piece for piece in self._pieces.values() if piece.record is record and not piece.sent]
        whole = record.descriptor.nbytes
        self._give_back(record, whole - record.cut_nbytes + sum(piece.descriptor.nbytes for piece in unsent))
        self._drop(record, reason)
        for piece in unsent:
            if piece.state == READY:
                self._let_go(piece)

    def _let_go(self, piece: PartCapture) -> None:
        if piece.descriptor.sequence in self._pieces:
            self.journal.clear(piece)
            self.slots.give(piece.slot)
            piece.slot = (piece.slot[0], 0, None)  # as in `_drop`
            piece.state = ABORTED
            del self._pieces[piece.descriptor.sequence]
            self.waiting.given()
