"""The books of one rank: every capture from the offer to its acknowledgement, in order and exactly counted.

Training threads admit captures and mark them ready; the client thread sends the ready ones in order and settles
them when the daemon answers. One lock guards everything and is held for microseconds; no call into torch, the
kernel or a log handler happens under it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from threading import get_ident
from typing import Optional

from capd_client.accounts import Accounts
from capd_client.allocator import EMPTY, Slot, SlotAllocator
from capd_client.counter_page import (
    COUNTER_ACKED,
    COUNTER_IN_FLIGHT,
    COUNTER_OFFERED,
    DROP_REASONS,
    DropReason,
)
from capd_client.counting import Counters
from capd_client.definitions import Definition
from capd_client.in_flight import ABORTED, COPYING, READY, Capture
from capd_client.protocol import Descriptor, NackRow
from capd_client.step_budget import StepBudget
from capd_client.thinning import Thinning
from capd_client.waiting import Waiting

__all__ = ["Books"]


class Books(Accounts):
    """Slots and the order of captures, and their accounts, under one lock.

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
        self.step_budget = StepBudget(step_nbytes)
        self.thinning = thinning
        self.waiting = Waiting(self.lock, slots, max_block_s)
        self._live: dict[int, Capture] = {}  # by sequence, ascending: everything that owns a slot
        self._queue: deque[Capture] = deque()  # not sent yet, by sequence
        self._resend: deque[Capture] = deque()  # sent on an earlier connection and not settled
        self._last_sequence = 0
        self.copying = False  # some thread may still write to a slot that was given up

    # -- the training thread's side -------------------------------------------------------------------

    def admit(
        self, definition: Definition, descriptor: Descriptor, behind_nbytes: int = 0
    ) -> Optional[Capture]:
        """Count an offer and give it a slot, a sequence and a place in the queue, or count the drop.

        behind_nbytes: room in the slot behind the tensor's bytes, for its statistics row. Fills in the descriptor's
        sequence and offset. Waits for room only under policy block.
        """
        nbytes, iteration = descriptor.nbytes + behind_nbytes, descriptor.moment.iteration
        with self.lock:
            words = self.counters.words
            words[COUNTER_OFFERED] += 1
            if self._refusing is not None:
                self._count_tensor(definition, descriptor, self._refusing)
                return None
            if not self.step_budget.has_room(iteration, nbytes):
                return self._no_room(definition, descriptor, DropReason.STEP_BUDGET)
            slot = self.slots.take(nbytes)
            if slot is None:
                if nbytes > self.slots.capacity:
                    return self._no_room(definition, descriptor, DropReason.TOO_LARGE)
                slot = self._wait_for(nbytes)
                if slot is None:
                    return self._no_room(definition, descriptor, self._refusing or DropReason.ARENA_FULL)
                if not self.step_budget.has_room(iteration, nbytes):  # others took it meanwhile
                    self.waiting.give(slot)
                    return self._no_room(definition, descriptor, DropReason.STEP_BUDGET)
            self.step_budget.take(iteration, nbytes)
            return self._enter(definition, descriptor, slot, nbytes)

    def _wait_for(self, nbytes: int) -> Optional[Slot]:
        """Policy block: a slot, if there is one in time. While it is waited for, the offer is not one yet."""
        waiting = self.waiting
        if not waiting.allowed(waiting.max_s):
            return None
        self.counters.words[COUNTER_OFFERED] -= 1
        slot = waiting.take(nbytes, waiting.max_s)
        self.counters.words[COUNTER_OFFERED] += 1  # in another place than before once all is closed
        return slot

    def _enter(
        self, definition: Definition, descriptor: Descriptor, slot: Slot, budgeted: int = 0
    ) -> Capture:
        """Give an offer its sequence and its place in the queue."""
        self._last_sequence += 1
        descriptor.sequence = self._last_sequence
        descriptor.offset = slot[0]
        capture = Capture(descriptor, definition, slot, COPYING, False, budgeted, get_ident())
        self._live[descriptor.sequence] = capture
        self.counters.words[COUNTER_IN_FLIGHT] = len(self._live)
        self._queue.append(capture)
        return capture

    def _no_room(
        self, definition: Definition, descriptor: Descriptor, reason: DropReason
    ) -> Optional[Capture]:
        """What becomes of an offer that there is no room for: a drop."""
        self._count_tensor(definition, descriptor, reason)
        if self.thinning is not None and reason in (DropReason.ARENA_FULL, DropReason.STEP_BUDGET):
            self.thinning.refused(descriptor.moment)
        return None

    def turn_away(
        self, definition: Definition, descriptor: Descriptor, reason: DropReason
    ) -> Optional[Capture]:
        """Count an offer that has no room somewhere else: a drop, or a capture of what is kept instead."""
        with self.lock:
            self.counters.words[COUNTER_OFFERED] += 1
            return self._no_room(definition, descriptor, self._refusing or reason)

    def reduce(self, capture: Capture) -> bool:
        """Whether an admitted capture that found no room behind the arena now stands for its statistics alone."""
        return False

    def ready(self, capture: Capture) -> None:
        """The slot holds the bytes: the capture may be sent. No effect on one that was given up meanwhile."""
        if capture.state == COPYING:
            with self.lock:
                if capture.state == COPYING:
                    capture.state = READY

    def abort(self, capture: Capture, reason: DropReason) -> None:
        """Give up an admitted capture that cannot be completed."""
        with self.lock:
            if capture.state == COPYING:
                self._give_back(capture, capture.budgeted)
                self._drop(capture, reason)
                if self.thinning is not None and reason is DropReason.RING_FULL:
                    self.thinning.refused(capture.descriptor.moment)

    def abandon(self, capture: Capture, reason: DropReason) -> None:
        """Give up an admitted capture whose slot may still be written: nobody gets that slot again."""
        with self.lock:
            if capture.state == COPYING:
                capture.slot = EMPTY
                self._give_back(capture, capture.budgeted)
                self._drop(capture, reason)

    def amid(self) -> Optional[Capture]:
        """The capture that this very thread is at: a signal handler has interrupted it."""
        with self.lock:
            for capture in self._live.values():
                if capture.state == COPYING and capture.thread == get_ident():
                    return capture
            return None

    def give_up(self, reason: DropReason) -> bool:
        """Drop the capture that this thread is `amid`; whether there was one.

        Its call may go on, or a copy of it be under way: the slot is nobody's any more, and the memory stays.
        """
        with self.lock:
            capture = self.amid()
            if capture is None:
                return False
            self.copying = True
            self.abandon(capture, reason)
            return True

    # -- the client thread's side ---------------------------------------------------------------------

    def next_batch(self, limit: int) -> list[Capture]:
        """Up to `limit` captures to send now, oldest first; one that is still being copied holds up the rest."""
        batch: list[Capture] = []
        with self.lock:
            while self._resend and len(batch) < limit:
                capture = self._resend.popleft()
                if capture.state == READY:
                    batch.append(capture)
            queue = self._queue
            while queue and len(batch) < limit and queue[0].state != COPYING:
                capture = queue.popleft()
                if capture.state == READY:
                    capture.sent = True
                    batch.append(capture)
        return batch

    def reconnected(self) -> None:
        """A new connection knows nothing: everything sent and not settled is due again, and every ledger row."""
        with self.lock:
            self._resend = deque(capture for capture in self._live.values() if capture.sent)
            self.ledger.forget_told()
            if self.thinning is not None:
                self.thinning.restart()

    def acknowledged(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Settle committed sequences, given as [first, last] ranges. Unknown ones are answered already."""
        with self.lock:
            for sequence in self._sequences(ranges):
                capture = self._live.get(sequence)
                if capture is not None and capture.sent:
                    self.counters.words[COUNTER_ACKED] += 1
                    self._release(capture)

    def _sequences(self, ranges: Iterable[tuple[int, int]]) -> Iterable[int]:
        for first, last in ranges:
            if last - first < len(self._live):
                yield from range(first, last + 1)
            else:  # a range may be wider than anything that is in flight
                yield from [sequence for sequence in self._live if first <= sequence <= last]

    def refused(self, rows: Iterable[NackRow]) -> None:
        """Settle sequences that the daemon will never commit, each under its reason."""
        with self.lock:
            for row in rows:
                capture = self._live.get(row.sequence)
                if capture is not None and capture.sent:
                    self._drop(capture, DROP_REASONS[row.reason])

    def take_offers(self, taken: bool) -> None:
        """Whether captures are taken from now on, or each dropped as `stopped`. What is in flight goes on."""
        with self.lock:
            if not self.waiting.closed:
                self._refusing = None if taken else DropReason.STOPPED

    def close(self, reason: DropReason) -> int:
        """Drop everything in flight and every later offer under `reason`; returns how many were in flight."""
        with self.lock:
            self._refusing = reason
            lost = list(self._live.values())
            self.copying = self.copying or any(capture.state == COPYING for capture in lost)
            for capture in lost:
                self._drop(capture, reason)
            self._queue.clear()
            self._resend.clear()
            self.waiting.close()
            return len(lost)

    # -- both ------------------------------------------------------------------------------------------

    @property
    def last_sequence(self) -> int:
        """The sequence given last; 0 before the first."""
        return self._last_sequence

    @property
    def unsent(self) -> bool:
        """Whether anything waits to be sent, ready or not."""
        return bool(self._queue or self._resend)

    @property
    def roomy(self) -> bool:
        """Whether more than half of the arena is free and nobody waits for room. A look without the lock."""
        return not self.waiting.count and 2 * self.slots.free_nbytes > self.slots.capacity

    @property
    def busy(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._live)

    def settled(self, upto: int) -> bool:
        """Whether every sequence ≤ `upto` is committed or dropped."""
        with self.lock:
            return next(iter(self._live), upto + 1) > upto

    def all_sent(self, upto: int) -> bool:
        """Whether every sequence ≤ `upto` that is in flight was sent on this connection."""
        with self.lock:
            waiting = [queue[0].descriptor.sequence for queue in (self._resend, self._queue) if queue]
            return min(waiting, default=upto + 1) > upto

    def _give_back(self, capture: Capture, nbytes: int) -> None:
        """The capture will not send `nbytes` of what its step's budget counts for it."""
        capture.budgeted -= nbytes
        self.step_budget.give(capture.descriptor.moment.iteration, nbytes)

    def _drop(self, capture: Capture, reason: DropReason) -> None:
        self._count_tensor(capture.definition, capture.descriptor, reason)
        self._release(capture)

    def _release(self, capture: Capture) -> None:
        capture.state = ABORTED
        del self._live[capture.descriptor.sequence]
        self.counters.words[COUNTER_IN_FLIGHT] = len(self._live)
        self.waiting.give(capture.slot)
