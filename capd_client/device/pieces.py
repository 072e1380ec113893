"""What goes from a device to the arena in one copy: a piece of a large capture, or a run of small neighbours.

Captures that wait together and are neighbours, in the ring as in the arena, are brought home by one copy with one
event: for a tensor of some KiB the calls cost more than its bytes. No copy crosses a border of the page lock: a
driver refuses one whose memory belongs to two registrations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Optional

import torch

from capd_client.arena.allocator import Slot
from capd_client.arena.arena import STEP_NBYTES
from capd_client.device.ring import Room
from capd_client.inflight.capture import Capture

__all__ = ["PIECE_NBYTES", "Piece", "Segment", "Snapshot", "cut"]

PIECE_NBYTES = 64 << 20
# Of a piece: a smaller rest goes with the piece before it, and is not worth a copy of its own.
_SLACK = 1 / 256

Segment = tuple[torch.Tensor, torch.Tensor]
"""A flat tensor on the device, and the place of its statistics row."""


class Snapshot:
    """The bytes of one capture on the device: `nbytes` of `memory` from `start` on, once the event `ready` happened.

    slot: the ring's, None where the captured tensor itself is held; then `version` is its version counter and
    `address` its place at capture, by which a change is found out. lent: whether it is held undeclared. room: what goes
    back to the ring in the end, or before, where another snapshot waits on the device for this one's copy. kept: what
    goes back in the end alone. stream: number of the stream that `ready` is of. source: what the bytes are the
    statistics row of, where that is still to be computed.
    """

    __slots__ = (
        "address", "capture", "kept", "lent", "memory", "nbytes", "ready", "room", "slot", "source", "start",
        "stream", "version",
    )  # fmt: skip

    def __init__(
        self,
        capture: Capture,
        memory: torch.Tensor,
        nbytes: int,
        ready: Any,
        stream: int,
        slot: Optional[Slot] = None,
        room: Sequence[Room] = (),
        *,
        kept: Sequence[Room] = (),
        source: Optional[torch.Tensor] = None,
        lent: bool = False,
    ) -> None:
        self.capture = capture
        self.memory = memory
        self.nbytes = nbytes
        self.ready = ready
        self.stream = stream
        self.slot = slot
        self.room = room
        self.kept = kept
        self.source = source
        self.lent = lent
        self.start = 0 if slot is None else slot[0]
        self.version = 0 if slot is not None else memory._version
        self.address = 0 if slot is not None else memory.data_ptr()

    @property
    def intact(self) -> bool:
        """Whether a held tensor is still what it was; a slot of the ring always is."""
        memory = self.memory
        return self.slot is not None or (
            memory.data_ptr() == self.address and memory._version == self.version
        )


class Piece:
    """One copy: `nbytes` of `memory` from `start` on go to `offset` of the arena, after the events `after`.

    ends: what has arrived with it. pinned: whether its place in the arena is page-locked. streams: those that its bytes
    are of. segments: what rows are to be computed of before the copy. done: an event after the copy; None until it is
    issued.
    """

    __slots__ = (
        "after", "done", "ends", "memory", "nbytes", "offset", "pinned", "segments", "start", "streams",
    )  # fmt: skip

    def __init__(
        self,
        memory: torch.Tensor,
        start: int,
        nbytes: int,
        offset: int,
        after: Sequence[Any],
        ends: Sequence[Snapshot] = (),
        *,
        pinned: bool = True,
        streams: Collection[int] = (),
    ) -> None:
        self.memory = memory
        self.start = start
        self.nbytes = nbytes
        self.offset = offset
        self.after = after
        self.ends = ends
        self.pinned = pinned
        self.streams = streams
        self.segments: Sequence[Segment] = ()
        self.done: Any = None

    @property
    def source(self) -> torch.Tensor:
        """Its bytes on the device."""
        return self.memory[self.start : self.start + self.nbytes]

    def target(self, arena: torch.Tensor) -> torch.Tensor:
        """Its place in the arena."""
        return arena[self.offset : self.offset + self.nbytes]


def cut(due: Sequence[Snapshot], issued: int, part_end: Callable[[int], int], piece_nbytes: int) -> Piece:
    """The next piece of `due`, of whose first snapshot `issued` bytes are under way already.

    part_end: where the page-locked part ends that an offset of the arena is in; 0 where that is not locked. The pieces
    of a capture follow each other on one stream: only the first one has an event to wait for.
    """
    first = due[0]
    memory, start = first.memory, first.start + issued
    offset = first.capture.slot[0] + issued
    after: tuple[Any, ...] = () if issued else (first.ready,)
    streams: tuple[int, ...] = (first.stream,)
    if not first.intact:  # nothing more is read of it; what is under way still writes to its slot
        return Piece(memory, 0, 0, first.capture.slot[0], after, (first,), streams=streams)
    end = part_end(offset)
    pinned = end > offset
    # What is locked next begins at a multiple of STEP_NBYTES: a copy that ends there is never half locked.
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
    """The first snapshot and those that continue it on both sides, `room` bytes in all at most."""
    run: list[Snapshot] = []
    for snapshot in due:
        if run and not (
            _continues(run[-1], snapshot) and snapshot.start + snapshot.nbytes - run[0].start <= room
        ):
            break
        run.append(snapshot)
    return run


def _continues(before: Snapshot, snapshot: Snapshot) -> bool:
    """Whether a snapshot is the next one in the ring, and its capture's slot in the arena as well."""
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
