"""The answers of the policies to an offer without room: drop it, keep its statistics, or send it in parts."""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

from capd_client.arena.allocator import SlotAllocator
from capd_client.config.settings import ClientConfig
from capd_client.inflight.capture import Capture
from capd_client.inflight.definitions import Definition
from capd_client.inflight.parts import Record
from capd_client.inflight.step_budget import StepBudget
from capd_client.inflight.thinning import Thinning
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.statistics_row import NO_ROW_DTYPES, ROW_NBYTES

__all__ = ["Block", "Drop", "KeepRows", "Room", "policy_of"]

_FULL = frozenset({DropReason.ARENA_FULL, DropReason.STEP_BUDGET})


class Room(NamedTuple):
    """Where offers find room."""

    slots: SlotAllocator
    budget: StepBudget


class Drop:
    """Policies drop and thin: an offer without room is dropped. Under thin, later calls are thinned out.

    max_block_s: how long one capture may wait for room, over all its parts; 0: not at all. As text it is what follows a
    full buffer. Methods are called with the queue's lock held.
    """

    max_block_s = 0.0

    def __init__(self, thinning: Optional[Thinning] = None) -> None:
        self.thinning = thinning

    def __str__(self) -> str:
        if self.thinning is None:
            return "captures are dropped"
        return f"policy thin keeps one of {self.thinning.one_of} calls from the next one on"

    def no_room(self, wanted: Capture, reason: DropReason, room: Room) -> Union[Capture, DropReason]:
        """The capture that takes the place of one without room, or the reason of the drop.

        wanted: without a slot.
        """
        if self.thinning is not None and reason in _FULL:
            self.thinning.refused(wanted.descriptor.moment)
        return reason

    def reduces(self, capture: Capture) -> bool:
        """Whether an admitted capture without room on its device now stands for its statistics alone."""
        return False


class KeepRows(Drop):
    """Policy stats: an offer without room becomes one of a statistics row.

    A row is small enough to find a place nearly always. Where it does not, and for 64-bit integers, whose statistics no
    row holds, the offer is dropped. Rows do not count against `max_mb_per_step`.
    """

    def no_room(self, wanted: Capture, reason: DropReason, room: Room) -> Union[Capture, DropReason]:
        """The capture of the row, in a slot of its own."""
        reducible = reason in _FULL or reason is DropReason.TOO_LARGE
        slot = room.slots.take(ROW_NBYTES) if reducible and _has_row(wanted.definition) else None
        if slot is None:
            return reason
        wanted.slot = slot
        return _reduced(wanted)

    def reduces(self, capture: Capture) -> bool:
        """The row takes the place of the payload, where that is not smaller."""
        if capture.slot[1] < ROW_NBYTES or not _has_row(capture.definition):
            return False
        _reduced(capture)
        return True


class Block(Drop):
    """Policy block: captures wait for room. A tensor larger than the arena becomes a Record, which goes in parts."""

    def __init__(self, max_block_s: float) -> None:
        super().__init__()
        self.max_block_s = max_block_s

    def no_room(self, wanted: Capture, reason: DropReason, room: Room) -> Union[Capture, DropReason]:
        """A Record of what is too large, where the budget of its step has room for all of it."""
        descriptor = wanted.descriptor
        nbytes, iteration = descriptor.nbytes, descriptor.moment.iteration
        if reason is not DropReason.TOO_LARGE:
            return reason
        if not room.budget.has_room(iteration, nbytes):
            return DropReason.STEP_BUDGET
        room.budget.take(iteration, nbytes)
        return Record(
            descriptor, wanted.definition, wanted.slot, budgeted=nbytes, thread=wanted.thread, kept="parts",
            patience_s=self.max_block_s,
        )  # fmt: skip


def policy_of(config: ClientConfig) -> Drop:
    """The policy that the settings name."""
    if config.max_block_s > 0:
        return Block(config.max_block_s)
    if config.policy == "stats":
        return KeepRows()
    return Drop(Thinning(config.sample_every) if config.policy == "thin" else None)


def _has_row(definition: Definition) -> bool:
    return definition.define.dtype not in NO_ROW_DTYPES


def _reduced(capture: Capture) -> Capture:
    """The same capture, now of the row at its slot."""
    descriptor, capture.kept = capture.descriptor, "row"
    descriptor.nbytes, descriptor.payload, descriptor.row_offset = 0, False, capture.slot[0]
    return capture
