"""The parts of tensors larger than the arena, which are sent one after the other (policy block).

A record is offered, in flight, and committed or dropped once, like any capture. It is never sent itself. Its parts
have their own slots and sequences. An ACK of a part frees the slot of that part. The ACK of the last part commits the
record. A NACK of any part drops the record. A part without bytes makes the daemon discard the earlier parts of its
record.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Optional

from msgspec.structs import replace

from capd_client.arena.allocator import EMPTY, GRANULE_NBYTES, Slot
from capd_client.inflight.capture import ABORTED, COPYING, READY, Capture
from capd_client.inflight.live import Live
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.messages import Part

__all__ = ["PartCapture", "Parts", "Record", "part_nbytes"]

_MAX_PART_NBYTES = 64 << 20


def part_nbytes(arena_nbytes: int) -> int:
    """Return the largest size of a part, for slots of `arena_nbytes`: a quarter, at most 64 MiB, in whole granules.

    With a quarter, the next part is copied while the daemon works on the earlier ones.
    """
    return max(GRANULE_NBYTES, min(_MAX_PART_NBYTES, arena_nbytes // 4 // GRANULE_NBYTES * GRANULE_NBYTES))


class Record(Capture):
    """A capture that is sent in parts. It has no slot, and it is COPYING until its last part is cut.

    Args:
        patience_s: The rest of the time that it may wait for room.
        cut_nbytes: The bytes in parts until now.
        dropped: The reason why it was given up or refused.
    """

    patience_s: float = 0.0
    cut_nbytes: int = 0
    dropped: Optional[DropReason] = None


class PartCapture(Capture, kw_only=True):
    """One part in flight. It outlives a dropped record while somebody may write or read its slot."""

    record: Record


class Parts:
    """The parts that have slots, by sequence, ascending. The caller of every method holds the queue's lock."""

    def __init__(self, records: Live) -> None:
        self.live: dict[int, PartCapture] = {}
        self._records = records

    def add(self, record: Record, nbytes: int, slot: Slot) -> PartCapture:
        """Make the next part of a record and put it into the line to send."""
        whole = record.descriptor
        sequence = self._records.last_sequence = self._records.last_sequence + 1
        part = Part(whole.sequence, record.cut_nbytes, whole.nbytes)
        descriptor = replace(whole, sequence=sequence, offset=slot[0], nbytes=nbytes, part=part)
        piece = PartCapture(descriptor, record.definition, slot, thread=get_ident(), record=record)
        self.live[sequence] = piece
        self._records.unsent += (piece,)
        record.cut_nbytes += nbytes
        if nbytes and record.cut_nbytes == whole.nbytes:
            record.state = READY
        return piece

    def unsent(self, record: Record) -> list[PartCapture]:
        """Return the parts of a record that are not sent yet."""
        return [piece for piece in self.live.values() if piece.record is record and not piece.sent]

    def give_up(self, record: Record, reason: DropReason) -> None:
        """Drop a record from this side. The daemon may hold parts of it, so a message makes it discard them."""
        if record.state != ABORTED:
            self.drop(record, reason)
            if record.cut_nbytes:
                self.add(record, 0, EMPTY).state = READY

    def drop(self, record: Record, reason: DropReason) -> None:
        """Count the drop of a record, once, and free the slots of parts that nobody writes or reads."""
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
        """Free the slots of acknowledged parts. The last part commits its record."""
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
        """Free the slot of a part that nobody writes or reads any more."""
        if self.live.pop(piece.descriptor.sequence, None) is not None:
            self._records.journal.clear(piece)
            # The offset stays, because a device may still copy to it.
            slot, piece.slot = piece.slot, (piece.slot[0], 0, None)
            piece.state = ABORTED
            self._records.waiting.give(slot)

    def close(self) -> bool:
        """Free all parts. Return whether one of their slots may still be written."""
        pieces = list(self.live.values())
        for piece in pieces:
            if piece.state == READY:
                # The journal keeps the cell for the daemon.
                piece.cell = None
        copying = any(piece.state == COPYING for piece in pieces)
        for piece in pieces:
            self.let_go(piece)
        return copying
