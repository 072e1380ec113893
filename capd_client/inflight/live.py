"""The offers in flight, and what the beginning and each end of one changes: its slot, its budget and the counters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from capd_client.arena.allocator import Slot, SlotAllocator
from capd_client.arena.waiting import Waiting
from capd_client.inflight.accounts import Accounts
from capd_client.inflight.capture import ABORTED, Capture, Refused
from capd_client.inflight.definitions import Definition
from capd_client.inflight.journal import Journal
from capd_client.inflight.outbox import Outbox
from capd_client.inflight.step_budget import StepBudget
from capd_client.protocol.counter_page import (
    COUNTER_ACKED,
    COUNTER_DROPS,
    COUNTER_IN_FLIGHT,
    COUNTER_OFFERED,
    DROP_REASONS,
    DropReason,
)
from capd_client.protocol.messages import Descriptor

__all__ = ["Live"]

_DROPPED = -1  # the sequence of an offer that got none
_CALM_SHARE = 8  # captures of less than this part of the arena can wait for the client thread's next tick


class Live:
    """Offers by sequence, ascending. Every method is called with the lock of `accounts` held.

    wake: called where an offer takes room that is running out. `calm_nbytes`: at least so much of the arena is free
    until then.
    """

    def __init__(
        self,
        accounts: Accounts,
        slots: SlotAllocator,
        journal: Journal,
        waiting: Waiting,
        step_budget: StepBudget,
        outbox: Outbox,
        wake: Callable[[], None],
    ) -> None:
        self.calm_nbytes = slots.capacity - slots.capacity // _CALM_SHARE
        self.offers: dict[int, Capture] = {}
        self.last_sequence = 0
        self._accounts = accounts
        self._counters = accounts.counters
        self._slots = slots
        self._journal = journal
        self._waiting = waiting
        self._step_budget = step_budget
        self._outbox = outbox
        self._wake = wake
        self._abandoned: list[Slot] = []  # a device may still write to them: nobody gets them again

    def enter(self, capture: Capture, *, queued: bool = True) -> Capture:
        """Count an offer as in flight, under a sequence and with a place in the outbox of its own.

        What is needed is computed first. No signal handler runs between the statements that then change it.
        """
        words, in_flight, descriptor = self._counters.words, len(self.offers) + 1, capture.descriptor
        descriptor.offset = capture.slot[0]
        sequence = self.last_sequence = descriptor.sequence = self.last_sequence + 1
        self.offers[sequence] = capture
        words[COUNTER_OFFERED] += 1
        words[COUNTER_IN_FLIGHT] = in_flight
        if queued:
            self._outbox.unsent += (capture,)
        slab = capture.slot[2]
        took_extent = slab is None or slab.live == 1
        if took_extent and self._slots.free_nbytes < self.calm_nbytes:
            self._wake()
        return capture

    def refuse(
        self, definition: Definition, descriptor: Descriptor, reason: DropReason, nbytes: int
    ) -> Refused:
        """Count an offer as a drop. nbytes: for which there was no room."""
        refused = Refused(
            reason, definition, nbytes, descriptor.moment.iteration, self._slots.capacity, counted=True
        )
        self._count_drop(definition, descriptor, reason)
        descriptor.sequence = _DROPPED
        self._counters.words[COUNTER_OFFERED] += 1
        return refused

    def give_back(self, capture: Capture, nbytes: int) -> None:
        """The capture will not send `nbytes` of the bytes that its step's budget counts for it."""
        capture.budgeted -= nbytes
        self._step_budget.give(capture.descriptor.moment.iteration, nbytes)

    def drop(self, capture: Capture, reason: DropReason) -> None:
        """Count a drop and free the slot."""
        self._journal.clear(capture)  # before anybody else may get its slot
        self._slots.give(capture.slot)
        capture.slot = (capture.slot[0], 0, None)  # a device may copy to it still: its place stays
        in_flight = len(self.offers) - 1
        self._count_drop(capture.definition, capture.descriptor, reason)
        del self.offers[capture.descriptor.sequence]
        capture.state = ABORTED
        self._counters.words[COUNTER_IN_FLIGHT] = in_flight
        self._waiting.given()

    def commit(self, capture: Capture) -> None:
        """Count a record and free the slot."""
        words = self._counters.words
        self._journal.clear(capture)
        words[COUNTER_ACKED] += 1
        del self.offers[capture.descriptor.sequence]
        words[COUNTER_IN_FLIGHT] = len(self.offers)
        capture.state = ABORTED
        self._waiting.give(capture.slot)

    def abandon_slot(self, capture: Capture) -> None:
        """Nobody gets the slot again; its place stays, as a copy to it may still be due."""
        self._abandoned.append(capture.slot)
        capture.slot = (capture.slot[0], 0, None)

    def recover(self, parts: Iterable[Capture]) -> None:
        """Make slots and counters right again, from what is in flight: an error may have come between two changes.

        parts: own slots, too.
        """
        owned = [capture.slot for capture in (*self.offers.values(), *parts)]
        self._slots.keep([*self._abandoned, *owned])
        words = self._counters.words
        drops = sum(words[COUNTER_DROPS : COUNTER_DROPS + len(DROP_REASONS)])
        words[COUNTER_OFFERED] = words[COUNTER_ACKED] + drops + len(self.offers)
        words[COUNTER_IN_FLIGHT] = len(self.offers)
        self._waiting.given()

    def _count_drop(self, definition: Definition, descriptor: Descriptor, reason: DropReason) -> None:
        """A drop has its tensor's bytes, also where only statistics would have travelled."""
        nbytes = math.prod(descriptor.shape) * definition.item_nbytes
        self._accounts.count(definition, reason, nbytes, descriptor.moment.iteration)
