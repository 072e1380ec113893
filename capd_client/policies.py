"""The answers of the policies to an offer without room: drop it, keep its statistics, send parts, thin out calls."""

from __future__ import annotations

from threading import get_ident
from typing import Optional, Union

from capd_client.allocator import EMPTY, SlotAllocator
from capd_client.config import ClientConfig
from capd_client.counter_page import DropReason
from capd_client.definitions import Definition
from capd_client.in_flight import Capture
from capd_client.key import Moment
from capd_client.parts import Record
from capd_client.protocol import Descriptor
from capd_client.statistics_row import NO_ROW_DTYPES, ROW_NBYTES
from capd_client.step_budget import StepBudget
from capd_client.thinning import Thinning

__all__ = ["Block", "Drop", "KeepRows", "Thin", "policy_of", "thinning_of"]

_FULL = frozenset({DropReason.ARENA_FULL, DropReason.STEP_BUDGET})


class Drop:
    """Policy drop: an offer without room is dropped. Methods of every policy are called with the queue's lock held.

    max_block_s: how long one capture may wait for room, over all its parts; 0: not at all.
    """

    max_block_s = 0.0
    consequence = "captures are dropped"

    def no_room(
        self,
        slots: SlotAllocator,
        budget: StepBudget,
        definition: Definition,
        descriptor: Descriptor,
        reason: DropReason,
    ) -> Union[Capture, DropReason]:
        """The capture that takes the place of an offer without room, or the reason of the drop."""
        return reason

    def reduces(self, capture: Capture) -> bool:
        """Whether an admitted capture without room on its device now stands for its statistics alone."""
        return False

    def ring_full(self, moment: Moment) -> None:
        """An admitted capture was dropped, because the device ring was full."""

    def restart(self) -> None:
        """The daemon is another, or back."""


class KeepRows(Drop):
    """Policy stats: an offer without room becomes one of a statistics row.

    A row is small enough to find a place nearly always. Where it does not, and for 64-bit integers, whose statistics no
    row holds, the offer is dropped. Rows do not count against `max_mb_per_step`.
    """

    def no_room(
        self,
        slots: SlotAllocator,
        budget: StepBudget,
        definition: Definition,
        descriptor: Descriptor,
        reason: DropReason,
    ) -> Union[Capture, DropReason]:
        """A capture of the row, in a slot of its own."""
        reducible = reason in _FULL or reason is DropReason.TOO_LARGE
        slot = slots.take(ROW_NBYTES) if reducible and _has_row(definition) else None
        if slot is None:
            return reason
        descriptor.nbytes, descriptor.payload, descriptor.row_offset = 0, False, slot[0]
        return Capture(descriptor, definition, slot, thread=get_ident(), kept="row")

    def reduces(self, capture: Capture) -> bool:
        """The row takes the place of the payload, where that is not smaller."""
        if capture.slot[1] < ROW_NBYTES or not _has_row(capture.definition):
            return False
        descriptor = capture.descriptor
        descriptor.nbytes, descriptor.payload, descriptor.row_offset = 0, False, descriptor.offset
        capture.kept = "row"
        return True


class Block(Drop):
    """Policy block: captures wait for room. A tensor larger than the arena becomes a Record, which goes in parts."""

    def __init__(self, max_block_s: float) -> None:
        self.max_block_s = max_block_s

    def no_room(
        self,
        slots: SlotAllocator,
        budget: StepBudget,
        definition: Definition,
        descriptor: Descriptor,
        reason: DropReason,
    ) -> Union[Capture, DropReason]:
        """A Record of what is too large, where the budget of its step has room for all of it."""
        nbytes, iteration = descriptor.nbytes, descriptor.moment.iteration
        if reason is not DropReason.TOO_LARGE:
            return reason
        if not budget.has_room(iteration, nbytes):
            return DropReason.STEP_BUDGET
        budget.take(iteration, nbytes)
        return Record(
            descriptor, definition, EMPTY, budgeted=nbytes, thread=get_ident(), kept="parts",
            patience_s=self.max_block_s,
        )  # fmt: skip


class Thin(Drop):
    """Policy thin: an offer without room is dropped, and later calls are thinned out."""

    def __init__(self, thinning: Thinning) -> None:
        self.thinning = thinning

    @property
    def consequence(self) -> str:  # type: ignore[override]
        """What follows, for the log."""
        return f"policy thin keeps one of {self.thinning.one_of} calls from the next one on"

    def no_room(
        self,
        slots: SlotAllocator,
        budget: StepBudget,
        definition: Definition,
        descriptor: Descriptor,
        reason: DropReason,
    ) -> Union[Capture, DropReason]:
        """A drop that the thinning is told of."""
        if reason in _FULL:
            self.thinning.refused(descriptor.moment)
        return reason

    def ring_full(self, moment: Moment) -> None:
        """The ring is a buffer, too."""
        self.thinning.refused(moment)

    def restart(self) -> None:
        """Every call is kept again."""
        self.thinning.restart()


def policy_of(config: ClientConfig) -> Drop:
    """The policy that the settings name."""
    if config.max_block_s > 0:
        return Block(config.max_block_s)
    if config.policy == "stats":
        return KeepRows()
    return Thin(Thinning(config.sample_every)) if config.policy == "thin" else Drop()


def thinning_of(policy: Drop) -> Optional[Thinning]:
    """The thinning of policy thin; None under any other policy."""
    return policy.thinning if isinstance(policy, Thin) else None


def _has_row(definition: Definition) -> bool:
    return definition.define.dtype not in NO_ROW_DTYPES
