"""What goes from a device to the arena in one copy: a piece of a large capture, or a run of small neighbours.

Captures that wait together and lie one behind the other, in the ring as in the arena, are brought home by one copy
with one event: for a tensor of some KiB the calls cost more than its bytes. A run is never larger than a piece, and
none crosses a multiple of STEP_NBYTES in the arena, which is page-locked in parts that end there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Optional

import torch

from capd_client.allocator import Slot
from capd_client.arena import STEP_NBYTES
from capd_client.in_flight import Capture

__all__ = ["PIECE_NBYTES", "Piece", "Snapshot", "cut"]

PIECE_NBYTES = 32 << 20


class Snapshot:
    """A capture's bytes on the device: `nbytes` of `memory` from `start` on, there once the event `ready` happened.

    slot: the ring's, None where the captured tensor itself is held; then `version` is its version counter and
    `address` its place at capture, by which a change is found out.
    """

    __slots__ = ("address", "capture", "memory", "nbytes", "ready", "slot", "start", "version")

    def __init__(
        self, capture: Capture, memory: torch.Tensor, nbytes: int, ready: Any, slot: Optional[Slot] = None
    ) -> None:
        self.capture = capture
        self.memory = memory
        self.nbytes = nbytes
        self.ready = ready
        self.slot = slot
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
    """One copy: `source` goes to `offset` of the arena behind the events `after`; with it `ends` have arrived."""

    __slots__ = ("after", "done", "ends", "offset", "source")

    def __init__(
        self, source: torch.Tensor, offset: int, after: Sequence[Any], ends: Sequence[Snapshot]
    ) -> None:
        self.source = source
        self.offset = offset
        self.after = after
        self.ends = ends
        self.done: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return self.source.numel()


def cut(due: deque[Snapshot], issued: int) -> Piece:
    """The next piece of `due`, of whose first snapshot `issued` bytes are under way already.

    The pieces of a capture follow each other on one stream: only the first one has an event to wait for.
    """
    first = due[0]
    if not first.intact:  # nothing more is read of it; what is under way still writes to its slot
        return Piece(first.memory[:0], first.capture.slot[0], () if issued else (first.ready,), (first,))
    left = first.nbytes - issued
    start = first.start + issued
    offset = first.capture.slot[0] + issued
    after = () if issued else (first.ready,)
    room = min(PIECE_NBYTES, STEP_NBYTES - offset % STEP_NBYTES)
    if left > room:
        return Piece(first.memory[start : start + room], offset, after, ())
    if issued:
        return Piece(first.memory[start : start + left], offset, after, (first,))
    run = _run(due, room)
    last = run[-1]
    stop = last.start + last.nbytes
    return Piece(first.memory[start:stop], offset, [snapshot.ready for snapshot in run], run)


def _run(due: deque[Snapshot], room: int) -> list[Snapshot]:
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
    """Whether a snapshot stands right behind another in the ring, and its capture's slot in the arena as well."""
    ring, ring_before = snapshot.slot, before.slot
    arena, arena_before = snapshot.capture.slot, before.capture.slot
    return (
        ring is not None
        and ring_before is not None
        and ring_before[1] == arena_before[1]
        and ring[0] == ring_before[0] + ring_before[1]
        and arena[0] == arena_before[0] + arena_before[1]
    )
