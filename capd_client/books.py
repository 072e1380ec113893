"""The books of one rank: every capture from the offer to its acknowledgement, in order and exactly counted.

Training threads admit captures and mark them ready; the client thread sends the ready ones in order and settles
them when the daemon answers. One lock guards everything and is held for microseconds; no call into torch, the
kernel or a log handler happens under it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from threading import get_ident
from typing import NoReturn, Optional

from capd_client.counter_page import (
    COUNTER_ACKED,
    COUNTER_IN_FLIGHT,
    DROP_REASONS,
    DropReason,
)
from capd_client.entrance import Entrance
from capd_client.errors import Counted
from capd_client.in_flight import ABORTED, COPYING, READY, Capture
from capd_client.protocol import MAX_BATCH, Descriptor, NackRow

__all__ = ["Books"]


class Books(Entrance):
    """Slots and the order of captures, and their accounts, under one lock. Arguments as for `Entrance`."""

    # -- the training thread's side -------------------------------------------------------------------

    def break_off(self, descriptor: Descriptor, error: BaseException) -> NoReturn:
        """End the offer that `error` came out of: its capture is dropped, unless it is ready or all with its device.

        Raises Counted from the error, or the error itself where the offer was not counted yet.
        """
        if not descriptor.sequence:
            raise error
        with self.lock:
            capture = self._live.get(descriptor.sequence)
            if capture is not None and capture.thread:
                self.abort(capture, DropReason.INTERNAL)
        raise Counted from error

    def reduce(self, capture: Capture) -> bool:
        """Whether an admitted capture that found no room behind the arena now stands for its statistics alone."""
        return False

    def ready(self, capture: Capture) -> None:
        """The slot holds the bytes: the capture may be sent. No effect on one that was given up meanwhile."""
        if capture.state == COPYING:
            with self.lock:
                if capture.state == COPYING:
                    self.journal.keep(capture)
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
                capture.slot = (capture.slot[0], 0, None)  # its place stays: a copy to it may still be due
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
                    self._commit(capture)

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
                self.refusing = None if taken else DropReason.STOPPED

    def close(self, reason: DropReason) -> int:
        """Drop everything in flight and every later offer under `reason`; returns how many were in flight.

        What is ready stays in the journal: a daemon that has the arena takes it once this process is gone.
        """
        with self.lock:
            self.refusing = reason
            lost = list(self._live.values())
            self.copying = self.copying or any(capture.state == COPYING for capture in lost)
            for capture in lost:
                if capture.state == READY:
                    capture.cell = None
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
    def calm(self) -> bool:
        """Whether so little of the arena is taken that what comes can wait to be sent. A look without the lock."""
        return not self.waiting.count and self.slots.free_nbytes >= self._calm_nbytes

    @property
    def behind(self) -> bool:
        """Whether more waits to be sent than one message takes. A look without the lock."""
        return len(self._queue) + len(self._resend) > MAX_BATCH

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
        """May be interrupted and called again: a slot is given back once, and counted is what was in flight."""
        self.journal.clear(capture)  # before anybody else may get its slot
        self.slots.give(capture.slot)
        capture.slot = (capture.slot[0], 0, None)  # a device may copy to it still: its place stays
        in_flight = len(self._live) - 1
        self._count_tensor(capture.definition, capture.descriptor, reason)
        del self._live[capture.descriptor.sequence]
        capture.state = ABORTED
        self.counters.words[COUNTER_IN_FLIGHT] = in_flight
        self.waiting.given()

    def _commit(self, capture: Capture) -> None:
        words = self.counters.words
        self.journal.clear(capture)
        words[COUNTER_ACKED] += 1
        del self._live[capture.descriptor.sequence]
        words[COUNTER_IN_FLIGHT] = len(self._live)
        capture.state = ABORTED
        self.waiting.give(capture.slot)
