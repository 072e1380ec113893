"""The offers in flight. Each beginning and end of an offer changes its slot, its budget and the counters here.

Two lines of captures wait to be sent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from capd_client.arena.allocator import Slot, SlotAllocator
from capd_client.arena.waiting import Waiting
from capd_client.inflight.accounts import Accounts
from capd_client.inflight.capture import ABORTED, COPYING, READY, Capture, Refused
from capd_client.inflight.definitions import Definition
from capd_client.inflight.journal import Journal
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

# The sequence of an offer that was dropped without one.
_DROPPED = -1
# Captures that take less than one part in _CALM_SHARE of the arena can wait for the client thread's next tick.
_CALM_SHARE = 8


class Live:
    """The offers by sequence, ascending, and the captures and parts to send. The caller of every method holds the lock.

    `wake` is called when an offer leaves less than `calm_nbytes` of the arena free. The line `resend` goes first. It
    holds captures that were sent on an earlier connection and are not settled. `unsent` holds all others, by sequence.
    """

    def __init__(
        self,
        accounts: Accounts,
        slots: SlotAllocator,
        journal: Journal,
        waiting: Waiting,
        step_budget: StepBudget,
        wake: Callable[[], None],
    ) -> None:
        self.calm_nbytes = slots.capacity - slots.capacity // _CALM_SHARE
        self.offers: dict[int, Capture] = {}
        self.unsent: deque[Capture] = deque()
        self.resend: deque[Capture] = deque()
        self.last_sequence = 0
        self._accounts = accounts
        self._counters = accounts.counters
        self.slots = slots
        self.journal = journal
        self.waiting = waiting
        self.step_budget = step_budget
        self._wake = wake
        # Slots that a device may still write to. No capture gets them again.
        self._abandoned: list[Slot] = []

    def enter(self, capture: Capture, *, queued: bool = True) -> Capture:
        """Count an offer as in flight. It gets a sequence and, if `queued`, a place in the line.

        All values are computed first. No signal handler runs between the statements that change the state afterwards.
        """
        words, in_flight, descriptor = self._counters.words, len(self.offers) + 1, capture.descriptor
        descriptor.offset = capture.slot[0]
        sequence = self.last_sequence = descriptor.sequence = self.last_sequence + 1
        self.offers[sequence] = capture
        words[COUNTER_OFFERED] += 1
        words[COUNTER_IN_FLIGHT] = in_flight
        if queued:
            self.unsent += (capture,)
        slab = capture.slot[2]
        took_extent = slab is None or slab.live == 1
        if took_extent and self.slots.free_nbytes < self.calm_nbytes:
            self._wake()
        return capture

    def refuse(
        self, definition: Definition, descriptor: Descriptor, reason: DropReason, nbytes: int
    ) -> Refused:
        """Count an offer as a drop. `nbytes` is the room that it asked for."""
        refused = Refused(
            reason, definition, nbytes, descriptor.moment.iteration, self.slots.capacity, counted=True
        )
        self._count_drop(definition, descriptor, reason)
        descriptor.sequence = _DROPPED
        self._counters.words[COUNTER_OFFERED] += 1
        return refused

    def give_back(self, capture: Capture, nbytes: int) -> None:
        """Return `nbytes` of a capture to the budget of its step, because they will not be sent."""
        capture.budgeted -= nbytes
        self.step_budget.give(capture.descriptor.moment.iteration, nbytes)

    def drop(self, capture: Capture, reason: DropReason) -> None:
        """Count a drop and free the slot."""
        # Before another capture can get the slot.
        self.journal.clear(capture)
        self.slots.give(capture.slot)
        # The offset stays, because a device may still copy to it.
        capture.slot = (capture.slot[0], 0, None)
        in_flight = len(self.offers) - 1
        self._count_drop(capture.definition, capture.descriptor, reason)
        del self.offers[capture.descriptor.sequence]
        capture.state = ABORTED
        self._counters.words[COUNTER_IN_FLIGHT] = in_flight
        self.waiting.given()

    def commit(self, capture: Capture) -> None:
        """Count a committed record and free the slot."""
        words = self._counters.words
        self.journal.clear(capture)
        words[COUNTER_ACKED] += 1
        del self.offers[capture.descriptor.sequence]
        words[COUNTER_IN_FLIGHT] = len(self.offers)
        capture.state = ABORTED
        self.waiting.give(capture.slot)

    def abandon_slot(self, capture: Capture) -> None:
        """Take the slot out of use. The capture keeps the offset, because a copy to it may still be due."""
        self._abandoned.append(capture.slot)
        capture.slot = (capture.slot[0], 0, None)

    def recover(self, parts: Iterable[Capture]) -> None:
        """Repair slots and counters from the captures in flight, because an error may have come between two changes.

        `parts` are the captures that have slots and are not offers.
        """
        owned = [capture.slot for capture in (*self.offers.values(), *parts)]
        self.slots.keep([*self._abandoned, *owned])
        words = self._counters.words
        drops = sum(words[COUNTER_DROPS : COUNTER_DROPS + len(DROP_REASONS)])
        words[COUNTER_OFFERED] = words[COUNTER_ACKED] + drops + len(self.offers)
        words[COUNTER_IN_FLIGHT] = len(self.offers)
        self.waiting.given()

    def next_batch(self, limit: int) -> list[Capture]:
        """Return up to `limit` captures to send now, oldest first. One that is still being copied stops the batch."""
        batch: list[Capture] = []
        while self.resend and len(batch) < limit:
            capture = self.resend.popleft()
            if capture.state == READY:
                batch.append(capture)
        unsent = self.unsent
        while unsent and len(batch) < limit and unsent[0].state != COPYING:
            capture = unsent.popleft()
            if capture.state == READY:
                capture.sent = True
                batch.append(capture)
        return batch

    def send_again(self, parts: Iterable[Capture]) -> None:
        """Put every sent and unsettled capture into the line `resend`, and of `parts` as well."""
        sent = [capture for capture in (*self.offers.values(), *parts) if capture.sent]
        self.resend = deque(sorted(sent, key=lambda capture: capture.descriptor.sequence))

    def all_sent(self, upto: int) -> bool:
        """Return whether no capture up to the sequence `upto` waits."""
        firsts = [line[0].descriptor.sequence for line in (self.resend, self.unsent) if line]
        return min(firsts, default=upto + 1) > upto

    def _count_drop(self, definition: Definition, descriptor: Descriptor, reason: DropReason) -> None:
        """Count a drop with the bytes of the tensor, also if only statistics would have been sent."""
        nbytes = math.prod(descriptor.shape) * definition.item_nbytes
        self._accounts.count(definition, reason, nbytes, descriptor.moment.iteration)
