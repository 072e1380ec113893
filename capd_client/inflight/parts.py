"""The parts of tensors larger than the arena, which travel one after the other (policy block).

The record is offered, in flight and committed or dropped once, like any capture, but never sent itself. Its parts
have slots and sequences of their own. An ACK of a part frees its slot, that of the last one commits the record, and
a NACK of any of them drops it. A part without bytes takes a record back of which the daemon holds parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Optional

from msgspec.structs import replace

from capd_client.arena.allocator import EMPTY, GRANULE_NBYTES, Slot, SlotAllocator
from capd_client.arena.waiting import Waiting
from capd_client.inflight.capture import ABORTED, COPYING, READY, Capture
from capd_client.inflight.journal import Journal
from capd_client.inflight.live import Live
from capd_client.inflight.outbox import Outbox
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.messages import Part

__all__ = ["PartCapture", "Parts", "Record", "part_nbytes"]

_MAX_PART_NBYTES = 64 << 20


def part_nbytes(arena_nbytes: int) -> int:
    """The most that one part takes of slots of `arena_nbytes`: a quarter, so that the next one is copied while the
    daemon works on those before; at most 64 MiB, whole granules."""
    return max(GRANULE_NBYTES, min(_MAX_PART_NBYTES, arena_nbytes // 4 // GRANULE_NBYTES * GRANULE_NBYTES))


class Record(Capture):
    """A capture that goes in parts. It has no slot; it is COPYING until its last part is cut.

    patience_s: the rest of the time that it may wait. cut_nbytes: bytes in parts so far. dropped: why it was given up
    or refused.
    """

    patience_s: float = 0.0
    cut_nbytes: int = 0
    dropped: Optional[DropReason] = None


class PartCapture(Capture, kw_only=True):
    """One part on its way. It outlives a dropped record for as long as somebody may write or read its slot."""

    record: Record


class Parts:
    """The parts that own slots, by sequence, ascending. Every method is called with the queue's lock held."""

    def __init__(
        self, slots: SlotAllocator, journal: Journal, waiting: Waiting, live: Live, outbox: Outbox
    ) -> None:
        self.live: dict[int, PartCapture] = {}
        self._records = live
        self._outbox = outbox
        self._slots = slots
        self._journal = journal
        self._waiting = waiting

    def add(self, record: Record, nbytes: int, slot: Slot) -> PartCapture:
        """The record's next part, in its place in the outbox."""
        whole = record.descriptor
        sequence = self._records.last_sequence = self._records.last_sequence + 1
        part = Part(whole.sequence, record.cut_nbytes, whole.nbytes)
        descriptor = replace(whole, sequence=sequence, offset=slot[0], nbytes=nbytes, part=part)
        piece = PartCapture(descriptor, record.definition, slot, thread=get_ident(), record=record)
        self.live[sequence] = piece
        self._outbox.unsent += (piece,)
        record.cut_nbytes += nbytes
        if nbytes and record.cut_nbytes == whole.nbytes:
            record.state = READY
        return piece

    def unsent(self, record: Record) -> list[PartCapture]:
        """Those of a record that are not sent yet."""
        return [piece for piece in self.live.values() if piece.record is record and not piece.sent]

    def give_up(self, record: Record, reason: DropReason) -> None:
        """Drop a record of our own accord: the daemon, which may hold parts of it, is told to let them go."""
        if record.state != ABORTED:
            self.drop(record, reason)
            if record.cut_nbytes:
                self.add(record, 0, EMPTY).state = READY

    def drop(self, record: Record, reason: DropReason) -> None:
        """Count the drop of a record, once; parts that nobody writes or reads give their slots back."""
        if record.state == ABORTED:
            return
        record.dropped = reason
        unsent = self.unsent(record)
        left = record.descriptor.nbytes - record.cut_nbytes
        self._records.give_back(record, left + sum(piece.descriptor.nbytes for piece in unsent))
        self._records.drop(record, reason)
        for piece in unsent:
            if piece.state == READY:
                self.let_go(piece)

    def acknowledged(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Free the slots of acknowledged parts; the last one commits its record."""
        for piece in list(self.live.values()):
            sequence = piece.descriptor.sequence
            if piece.sent and any(first <= sequence <= last for first, last in ranges):
                self.let_go(piece)
                if piece.descriptor.ends_record and piece.record.state != ABORTED:
                    self._records.commit(piece.record)

    def refused(self, sequence: int, reason: DropReason) -> None:
        """Free the slot of a refused part, and drop its record. No effect on other sequences."""
        piece = self.live.get(sequence)
        if piece is not None and piece.sent:
            self.let_go(piece)
            self.drop(piece.record, reason)

    def let_go(self, piece: PartCapture) -> None:
        """Nobody writes or reads the slot of a part any more."""
        if self.live.pop(piece.descriptor.sequence, None) is not None:
            self._journal.clear(piece)
            slot, piece.slot = piece.slot, (piece.slot[0], 0, None)  # a device may copy to it still
            piece.state = ABORTED
            self._slots.give(slot)
            self._waiting.given()

    def close(self) -> bool:
        """Let all go. Returns whether one of them may still be written."""
        pieces = list(self.live.values())
        for piece in pieces:
            if piece.state == READY:
                piece.cell = None  # it stays in the journal, for the daemon
        copying = any(piece.state == COPYING for piece in pieces)
        for piece in pieces:
            self.let_go(piece)
        return copying
