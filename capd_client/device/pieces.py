"""The pieces that go from a device to the arena in one copy: a part of a large capture, or a run of small neighbours.

Waiting captures that are neighbours both in the ring and in the arena share one copy with one event. For a tensor of
some KiB, the calls cost more than its bytes. No copy crosses a border of the page lock, because a driver refuses a
copy whose memory belongs to two registrations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Optional

import msgspec
import torch

from capd_client.arena.allocator import Slot
from capd_client.arena.arena import STEP_NBYTES
from capd_client.device.ring import Room
from capd_client.inflight.capture import Capture

__all__ = ["PIECE_NBYTES", "Piece", "Segment", "Snapshot", "cut"]

PIECE_NBYTES = 64 << 20
# A share of a piece: a smaller rest is not worth its own copy, and joins the piece before it.
_SLACK = 1 / 256

Segment = tuple[torch.Tensor, torch.Tensor]
"""A flat tensor on the device, and the memory of its statistics row."""


class Snapshot(msgspec.Struct, eq=False):
    """The bytes of one capture on the device: `nbytes` of `memory` from `start` on, valid after the event `ready`.

    Attributes:
        stream: The number of the stream of `ready`.
        slot: The slot in the ring; None if the captured tensor itself is held.
        room: The slots that return to the ring at the end. They return earlier if another snapshot waits on the device
            for this copy.
        row_room: The slots that return only at the end.
        source: The tensor whose statistics row the bytes will be; None if they are no row or already computed.
        lent: Whether the tensor is held although nobody declared it immutable.
        version: The version counter of a held tensor at capture. A change of it or of `address` shows a write.
        address: The address of a held tensor at capture.
    """

    capture: Capture
    memory: torch.Tensor
    nbytes: int
    ready: Any
    stream: int
    slot: Optional[Slot] = None
    room: Sequence[Room] = ()
    row_room: Sequence[Room] = ()
    source: Optional[torch.Tensor] = None
    lent: bool = False
    start: int = 0
    version: int = 0
    address: int = 0

    def __post_init__(self) -> None:
        if self.slot is not None:
            self.start = self.slot[0]
        else:
            self.version, self.address = self.memory._version, self.memory.data_ptr()

    @property
    def intact(self) -> bool:
        """Whether a held tensor is unchanged; always true for a slot of the ring."""
        memory = self.memory
        return self.slot is not None or (
            memory.data_ptr() == self.address and memory._version == self.version
        )


class Piece(msgspec.Struct, eq=False):
    """A copy: `nbytes` of `memory` from `start` on go to `offset` of the arena, after the events `after`.

    Attributes:
        ends: The snapshots that are complete with this copy.
        pinned: Whether the place in the arena is page-locked.
        streams: The streams of its bytes.
        segments: The rows to compute before the copy.
        done: An event after the copy; None until it is issued.
    """

    memory: torch.Tensor
    start: int
    nbytes: int
    offset: int
    after: Sequence[Any]
    ends: Sequence[Snapshot] = ()
    pinned: bool = True
    streams: Collection[int] = ()
    segments: Sequence[Segment] = ()
    done: Any = None

    @property
    def source(self) -> torch.Tensor:
        """The bytes on the device."""
        return self.memory[self.start : self.start + self.nbytes]

    def target(self, arena: torch.Tensor) -> torch.Tensor:
        """Return the place in the arena."""
        return arena[self.offset : self.offset + self.nbytes]


def cut(due: Sequence[Snapshot], issued: int, part_end: Callable[[int], int], piece_nbytes: int) -> Piece:
    """Return the next piece to copy.

    The pieces of one capture follow each other on one stream. Only the first has an event to wait for.

    Args:
        due: The snapshots to copy, in order.
        issued: The bytes of the first snapshot that are already under way.
        part_end: Returns the end of the page-locked part that holds an offset of the arena; 0 if it is not locked.
        piece_nbytes: The usual size of a piece.
    """
    first = due[0]
    memory, start = first.memory, first.start + issued
    offset = first.capture.slot[0] + issued
    after: tuple[Any, ...] = () if issued else (first.ready,)
    streams: tuple[int, ...] = (first.stream,)
    if not first.intact:
        # Nothing more is read from it, but copies under way still write to its slot.
        return Piece(memory, 0, 0, first.capture.slot[0], after, (first,), streams=streams)
    end = part_end(offset)
    pinned = end > offset
    # The next locked part begins at a multiple of STEP_NBYTES, so a copy that ends there is never half locked.
    border = end - offset if pinned else STEP_NBYTES - offset % STEP_NBYTES
    most = min(border, piece_nbytes + int(piece_nbytes * _SLACK))
    left = first.nbytes - issued
    if left > most:
        nbytes = min(border, piece_nbytes)
        return Piece(memory, start, nbytes, offset, after, pinned=pinned, streams=streams)
    if issued:
        return Piece(memory, start, left, offset, after, (first,), pinned=pinned, streams=streams)
    run = _run(due, most)
    if len(run) > 1:
        # The events of one stream happen in their order.
        last = {snapshot.stream: snapshot.ready for snapshot in run}
        after, streams = tuple(last.values()), tuple(last)
        left = run[-1].start + run[-1].nbytes - start
    piece = Piece(memory, start, left, offset, after, run, pinned=pinned, streams=streams)
    piece.segments = _segments(run)
    return piece


def _segments(run: Sequence[Snapshot]) -> list[Segment]:
    return [
        (one.source, one.memory[one.start : one.start + one.nbytes].view(torch.float64))
        for one in run
        if one.source is not None
    ]


def _run(due: Sequence[Snapshot], room: int) -> list[Snapshot]:
    """Return the first snapshot and the neighbours that continue it on both sides, at most `room` bytes in all."""
    run: list[Snapshot] = []
    for snapshot in due:
        if run and not (
            _continues(run[-1], snapshot) and snapshot.start + snapshot.nbytes - run[0].start <= room
        ):
            break
        run.append(snapshot)
    return run


def _continues(before: Snapshot, snapshot: Snapshot) -> bool:
    """Return whether a snapshot is the next one in the ring, and its capture's slot the next one in the arena."""
    ring, ring_before = snapshot.slot, before.slot
    arena, arena_before = snapshot.capture.slot, before.capture.slot
    return (
        ring is not None
        and ring_before is not None
        and before.memory is snapshot.memory
        and ring_before[1] == arena_before[1]
        and ring[0] == ring_before[0] + ring_before[1]
        and arena[0] == arena_before[0] + arena_before[1]
    )
