"""Where captures enter the books: each offer gets a slot, a sequence and a place in the queue, or is a counted drop.

An offer is counted where its fate is decided, and what makes it so is computed before: a signal handler that raises in
the middle leaves an offer that is not counted, or one that has its fate (see `Accounts` on where handlers run).
"""

from __future__ import annotations

from collections import deque
from threading import get_ident
from typing import Optional

from capd_client.accounts import Accounts
from capd_client.allocator import Slot, SlotAllocator
from capd_client.counter_page import COUNTER_IN_FLIGHT, COUNTER_OFFERED, DropReason
from capd_client.counting import Counters
from capd_client.definitions import Definition
from capd_client.in_flight import COPYING, Capture
from capd_client.journal import Journal
from capd_client.protocol import Descriptor
from capd_client.step_budget import StepBudget
from capd_client.thinning import Thinning
from capd_client.waiting import Waiting

__all__ = ["Entrance"]

_DROPPED = -1  # the sequence of an offer that got none
_CALM_SHARE = 8  # captures of less than this part of the arena can wait for the client thread's next tick


class Entrance(Accounts):
    """Gives slots and sequences, under one lock.

    max_block_s: how long `admit` may wait for room (0: policy drop), see `capd_client.waiting`.
    step_nbytes: what the captures of one iteration may take together (None: no limit).
    thinning: under policy thin, what is told of captures that found no room.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        counters: Counters,
        *,
        max_block_s: float = 0.0,
        step_nbytes: Optional[int] = None,
        thinning: Optional[Thinning] = None,
    ) -> None:
        super().__init__(counters)
        self.slots = slots
        self.journal = Journal(self.lock)
        self.definitions.interned = self.journal.define
        self.step_budget = StepBudget(step_nbytes)
        self.thinning = thinning
        self.waiting = Waiting(self.lock, slots, max_block_s)
        self._calm_nbytes = (
            slots.capacity - slots.capacity // _CALM_SHARE
        )  # at least so much is free while calm
        self._live: dict[int, Capture] = {}  # by sequence, ascending: everything that owns a slot
        self._queue: deque[Capture] = deque()  # not sent yet, by sequence
        self._resend: deque[Capture] = deque()  # sent on an earlier connection and not settled
        self._last_sequence = 0
        self.copying = False  # some thread may still write to a slot that was given up

    def admit(
        self, definition: Definition, descriptor: Descriptor, behind_nbytes: int = 0
    ) -> Optional[Capture]:
        """Count an offer and give it a slot, a sequence and a place in the queue, or count the drop.

        behind_nbytes: room in the slot behind the tensor's bytes, for its statistics row. Fills in the descriptor's
        sequence and offset. Waits for room only under policy block.
        """
        nbytes = descriptor.nbytes + behind_nbytes
        slot: Optional[Slot] = None
        try:
            with self.lock:
                if self.refusing is not None:
                    self._refuse(definition, descriptor, self.refusing)
                    return None
                limited = self.step_budget.nbytes is not None
                if limited and not self.step_budget.has_room(descriptor.moment.iteration, nbytes):
                    return self._no_room(definition, descriptor, DropReason.STEP_BUDGET)
                slot = self.slots.take(nbytes)
                if slot is None:
                    if nbytes > self.slots.capacity:
                        return self._no_room(definition, descriptor, DropReason.TOO_LARGE)
                    if self.waiting.max_s:
                        slot = self.waiting.take(nbytes, self.waiting.max_s)
                    if slot is None:
                        return self._no_room(definition, descriptor, self.refusing or DropReason.ARENA_FULL)
                    # Others may have taken it meanwhile.
                    if not self.step_budget.has_room(descriptor.moment.iteration, nbytes):
                        self.slots.give(slot)
                        slot = None
                        self.waiting.given()
                        return self._no_room(definition, descriptor, DropReason.STEP_BUDGET)
                if limited:
                    self.step_budget.take(descriptor.moment.iteration, nbytes)
                return self._enter(Capture(descriptor, definition, slot, COPYING, False, nbytes, get_ident()))
        except BaseException:
            if slot is not None and not descriptor.sequence:
                with self.lock:
                    self.waiting.give(slot)
            raise

    def _enter(self, capture: Capture, *, queued: bool = True) -> Capture:
        """Count an offer as in flight, under a sequence and with a place in the queue of its own."""
        words, in_flight, descriptor = self.counters.words, len(self._live) + 1, capture.descriptor
        descriptor.offset = capture.slot[0]
        sequence = self._last_sequence = descriptor.sequence = self._last_sequence + 1
        self._live[sequence] = capture
        words[COUNTER_OFFERED] += 1
        words[COUNTER_IN_FLIGHT] = in_flight
        if queued:
            self._queue += (capture,)
        slab = capture.slot[2]
        took_extent = slab is None or slab.live == 1
        if took_extent and self.slots.free_nbytes < self._calm_nbytes:
            self.waiting.on_begin()
        return capture

    def _refuse(self, definition: Definition, descriptor: Descriptor, reason: DropReason) -> None:
        """Count an offer as a drop."""
        self._count_tensor(definition, descriptor, reason)
        descriptor.sequence = _DROPPED
        self.counters.words[COUNTER_OFFERED] += 1

    def _no_room(
        self, definition: Definition, descriptor: Descriptor, reason: DropReason
    ) -> Optional[Capture]:
        """What becomes of an offer that there is no room for: a drop."""
        self._refuse(definition, descriptor, reason)
        if self.thinning is not None and reason in (DropReason.ARENA_FULL, DropReason.STEP_BUDGET):
            self.thinning.refused(descriptor.moment)
        return None

    def turn_away(
        self, definition: Definition, descriptor: Descriptor, reason: DropReason
    ) -> Optional[Capture]:
        """Count an offer that has no room somewhere else: a drop, or a capture of what is kept instead."""
        with self.lock:
            return self._no_room(definition, descriptor, self.refusing or reason)
