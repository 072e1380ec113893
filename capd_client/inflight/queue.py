"""The in-flight queue of one rank: every capture from the offer to its acknowledgement, in order and exactly counted.

Training threads admit captures and mark them ready. The client thread sends the ready captures in order and settles
them when the daemon answers. One lock guards everything and is held for microseconds. No call into torch, the
kernel or a log handler happens under the lock.

A signal handler of the job may raise inside the queue. `settle` then repairs slots and counters from the captures in
flight. So no method has to undo its own changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from threading import get_ident
from time import monotonic
from typing import Optional, Union

from capd_client.arena.allocator import EMPTY, Slot, SlotAllocator
from capd_client.arena.waiting import Waiting
from capd_client.inflight.accounts import Accounts
from capd_client.inflight.capture import ABORTED, COPYING, READY, Capture, Refused
from capd_client.inflight.counters import Counters
from capd_client.inflight.definitions import Definition
from capd_client.inflight.journal import Journal
from capd_client.inflight.live import Live
from capd_client.inflight.parts import PartCapture, Parts, Record, part_nbytes
from capd_client.inflight.policies import Drop
from capd_client.inflight.step_budget import StepBudget
from capd_client.protocol.counter_page import DROP_REASONS, DropReason
from capd_client.protocol.messages import MAX_BATCH, Descriptor, NackRow

__all__ = ["Queue"]


class Queue(Accounts):
    """The slots of one rank, the order of its captures, and their accounts, under one lock.

    Args:
        slots: The slots of the arena.
        counters: The words to count in.
        policy: Decides once about every offer without room.
        step_nbytes: The limit in bytes for all captures of one iteration; None: no limit.
        wake: Called when the client thread has work to do.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        counters: Counters,
        policy: Optional[Drop] = None,
        *,
        step_nbytes: Optional[int] = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        lock = threading.RLock()
        self.journal = Journal(lock)
        super().__init__(counters, lock, self.journal.define)
        self.slots = slots
        self.policy = policy or Drop()
        self.step_budget = StepBudget(step_nbytes)
        self.waiting = Waiting(lock, slots, self.policy.max_block_s, wake)
        self.part_nbytes = part_nbytes(slots.capacity)
        # Whether some thread may still write to a slot that was given up.
        self.copying = False
        self._live = Live(self, slots, self.journal, self.waiting, self.step_budget, wake)
        self.parts = Parts(self._live)

    # -- the training thread's side -------------------------------------------------------------------

    def admit(
        self, definition: Definition, descriptor: Descriptor, row_nbytes: int = 0
    ) -> Union[Capture, Refused]:
        """Count an offer and give it a slot, a sequence and a place in the queue, or count the drop.

        Args:
            definition: The definition of the tensor.
            descriptor: The queue fills in its sequence and offset.
            row_nbytes: The room after the tensor's bytes in the slot, for its statistics row.

        Returns:
            The capture, or the refusal with the reason of the drop. The capture's `kept` names the part of the tensor
            that is kept.
        """
        nbytes = descriptor.nbytes + row_nbytes
        with self.lock:
            if self.refusing is not None:
                return self._live.refuse(definition, descriptor, self.refusing, nbytes)
            limited = self.step_budget.nbytes is not None and not definition.is_scalar
            if limited and not self.step_budget.has_room(descriptor.moment.iteration, nbytes):
                return self._no_room(definition, descriptor, DropReason.STEP_BUDGET, nbytes)
            slot = self.slots.take(nbytes)
            if slot is None:
                found = (
                    DropReason.ARENA_FULL
                    if definition.is_scalar
                    else self._wait_for_room(nbytes, descriptor.moment.iteration)
                )
                if isinstance(found, DropReason):
                    return self._no_room(definition, descriptor, found, nbytes)
                slot = found
            if limited:
                self.step_budget.take(descriptor.moment.iteration, nbytes)
            return self._live.enter(
                Capture(descriptor, definition, slot, COPYING, False, nbytes, get_ident())
            )

    def turn_away(
        self, definition: Definition, descriptor: Descriptor, reason: DropReason
    ) -> Union[Capture, Refused]:
        """Count an offer that has no room on its device. Return the refusal, or the capture that the policy keeps."""
        with self.lock:
            return self._no_room(definition, descriptor, self.refusing or reason, descriptor.nbytes)

    def cut(self, record: Record, nbytes: int) -> Optional[PartCapture]:
        """Return the next part of a record, with a slot for `nbytes`, a sequence and a place in the queue.

        Waits for room until the record's patience is used up, then drops the record.

        Returns:
            The part, or None if the record is dropped for any reason.
        """
        with self.lock:
            if record.state == ABORTED:
                return None
            slot = self.slots.take(nbytes)
            if slot is None:
                began = monotonic()
                slot = self.waiting.take(nbytes, record.patience_s)
                record.patience_s -= monotonic() - began
            # The record was refused during the wait, or the queue was closed.
            if record.state == ABORTED:
                if slot is not None:
                    self.waiting.give(slot)
                return None
            if slot is None:
                self.parts.give_up(record, DropReason.ARENA_FULL)
                return None
            return self.parts.add(record, nbytes, slot)

    def reduce(self, capture: Capture) -> bool:
        """Reduce an admitted capture without room on its device to its statistics. Return whether that was possible."""
        with self.lock:
            if not self.policy.reduces(capture):
                return False
            self._live.give_back(capture, capture.budgeted)
            return True

    def ready(self, capture: Capture) -> None:
        """Mark a capture as ready to be sent: its slot holds the bytes. No effect on a capture that was given up."""
        if capture.state != COPYING:
            return
        with self.lock:
            if capture.state != COPYING:
                return
            # Most queues have no parts, and `isinstance` of a Struct is slow.
            if self.parts.live and isinstance(capture, PartCapture) and capture.record.state == ABORTED:
                self.parts.let_go(capture)
                return
            self.journal.keep(capture)
            capture.state = READY

    def abort(self, capture: Capture, reason: DropReason) -> None:
        """Give up an admitted capture that cannot be completed. For a part, give up its record."""
        with self.lock:
            if isinstance(capture, Record):
                self.parts.give_up(capture, reason)
            elif isinstance(capture, PartCapture):
                self.parts.give_up(capture.record, reason)
                if capture.state == COPYING:
                    self.parts.let_go(capture)
            elif capture.state == COPYING:
                self._live.give_back(capture, capture.budgeted)
                self._live.drop(capture, reason)
                thinning = None if capture.definition.is_scalar else self.policy.thinning
                if thinning is not None and reason is DropReason.RING_FULL:
                    thinning.refused(capture.descriptor.moment)

    def abandon(self, capture: Capture, reason: DropReason) -> None:
        """Give up an admitted capture whose slot may still be written. No capture gets that slot again."""
        with self.lock:
            if capture.state == COPYING:
                self._live.abandon_slot(capture)
                self.abort(capture, reason)

    def settle(self, definition: Definition, descriptor: Descriptor, reason: DropReason) -> None:
        """End an offer that an error interrupted. It is dropped, unless it is ready or its device still copies it."""
        with self.lock:
            self._live.recover(self.parts.live.values())
            capture = self._live.offers.get(descriptor.sequence)
            if capture is not None:
                if isinstance(capture, Record):
                    for piece in self.parts.unsent(capture):
                        if piece.state == COPYING and piece.thread:
                            self.abort(piece, reason)
                if capture.state == COPYING and capture.thread:
                    self.abort(capture, reason)
            elif not descriptor.sequence:
                self._live.refuse(definition, descriptor, reason, 0)

    def interrupted_here(self) -> bool:
        """Return whether this thread is in the middle of a capture. If so, a signal handler in it must not wait."""
        if self.inside():
            return True
        with self.lock:
            captures = (*self._live.offers.values(), *self.parts.live.values())
            return any(one.state == COPYING and one.thread == get_ident() for one in captures)

    # -- the client thread's side ---------------------------------------------------------------------

    def next_batch(self, limit: int) -> list[Capture]:
        """Return up to `limit` captures to send now, oldest first. One that is still being copied stops the batch."""
        with self.lock:
            return self._live.next_batch(limit)

    def reconnected(self) -> None:
        """Prepare for a new connection. Every sent and unsettled capture is due again, and every ledger row."""
        with self.lock:
            self._live.send_again(self.parts.live.values())
            self.ledger.forget_reported()
            if self.policy.thinning is not None:
                self.policy.thinning.restart()

    def acknowledged(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Settle committed sequences, given as [first, last] ranges. Unknown sequences are settled already."""
        ranges = list(ranges)
        with self.lock:
            for sequence in self._sequences(ranges):
                capture = self._live.offers.get(sequence)
                if capture is not None and capture.sent:
                    self._live.commit(capture)
            if self.parts.live:
                self.parts.acknowledged(ranges)

    def refused(self, rows: Iterable[NackRow]) -> None:
        """Settle sequences that the daemon will never commit, each with its reason."""
        with self.lock:
            for row in rows:
                reason, capture = DROP_REASONS[row.reason], self._live.offers.get(row.sequence)
                self.parts.refused(row.sequence, reason)
                if capture is not None and capture.sent:
                    self._live.drop(capture, reason)

    def take_offers(self, taken: bool) -> None:
        """Take offers from now on, or drop each as `stopped`. Captures in flight continue."""
        with self.lock:
            if not self.waiting.closed:
                self.refusing = None if taken else DropReason.STOPPED

    def close(self, reason: DropReason) -> int:
        """Drop everything in flight and every later offer for `reason`. Return the number of captures in flight.

        Ready captures stay in the journal. A daemon that has the arena takes them after this process is gone.
        """
        with self.lock:
            self.refusing = reason
            lost = list(self._live.offers.values())
            self.copying = self.copying or any(capture.state == COPYING for capture in lost)
            for capture in lost:
                if capture.state == READY:
                    capture.cell = None
                self._live.drop(capture, reason)
            self._live.unsent.clear()
            self._live.resend.clear()
            self.waiting.close()
            self.copying = self.parts.close() or self.copying
            return len(lost)

    # -- both ------------------------------------------------------------------------------------------

    @property
    def last_sequence(self) -> int:
        """The newest sequence; 0 before the first."""
        return self._live.last_sequence

    @property
    def unsent(self) -> bool:
        """Whether anything waits to be sent, ready or not."""
        return bool(self._live.unsent or self._live.resend)

    @property
    def roomy(self) -> bool:
        """Whether more than half of the arena is free and nobody waits for room. Read without the lock."""
        return not self.waiting.count and 2 * self.slots.free_nbytes > self.slots.capacity

    @property
    def calm(self) -> bool:
        """Whether so little of the arena is taken that new captures can wait to be sent. Read without the lock."""
        return not self.waiting.count and self.slots.free_nbytes >= self._live.calm_nbytes

    @property
    def behind(self) -> bool:
        """Whether more captures wait to be sent than one message takes. Read without the lock."""
        return len(self._live.unsent) + len(self._live.resend) > MAX_BATCH

    @property
    def busy(self) -> bool:
        """Whether anything is in flight, including parts of dropped records."""
        return bool(self._live.offers or self.parts.live)

    def settled(self, upto: int) -> bool:
        """Return whether every sequence ≤ `upto` is committed or dropped."""
        with self.lock:
            return next(iter(self._live.offers), upto + 1) > upto

    def all_sent(self, upto: int) -> bool:
        """Return whether every sequence ≤ `upto` that is in flight was sent on this connection."""
        with self.lock:
            return self._live.all_sent(upto)

    # -- with the lock held ----------------------------------------------------------------------------

    def _wait_for_room(self, nbytes: int, iteration: int) -> Union[Slot, DropReason]:
        """Wait for a slot as long as the policy allows. Return the slot, or the reason why there is none."""
        if nbytes > self.slots.capacity:
            return DropReason.TOO_LARGE
        slot = self.waiting.take(nbytes, self.waiting.max_s)
        if slot is None:
            return self.refusing or DropReason.ARENA_FULL
        # Other captures may have used up the budget during the wait.
        if not self.step_budget.has_room(iteration, nbytes):
            self.waiting.give(slot)
            return DropReason.STEP_BUDGET
        return slot

    def _no_room(
        self, definition: Definition, descriptor: Descriptor, reason: DropReason, nbytes: int
    ) -> Union[Capture, Refused]:
        if definition.is_scalar:
            return self._live.refuse(definition, descriptor, reason, nbytes)
        wanted = Capture(descriptor, definition, EMPTY, thread=get_ident())
        found = self.policy.no_room(wanted, reason, self._live)
        if isinstance(found, DropReason):
            return self._live.refuse(definition, descriptor, found, nbytes)
        return self._live.enter(found, queued=not isinstance(found, Record))

    def _sequences(self, ranges: Iterable[tuple[int, int]]) -> Iterable[int]:
        for first, last in ranges:
            if last - first < len(self._live.offers):
                yield from range(first, last + 1)
            else:
                # A range may be much wider than the captures in flight.
                yield from [sequence for sequence in self._live.offers if first <= sequence <= last]
