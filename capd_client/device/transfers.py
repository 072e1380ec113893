"""The copies of one device: due, under way, done, in the order in which the captures were handed over.

A training thread issues copies itself where enough is due: the link need not wait for another thread then. The copy
pump (capd_client.device.pump) issues the rest, and finishes what is done. One lock guards both; a training thread does
not wait for the pump to issue.

Each list is changed by one statement that calls nothing. So a signal handler that raises in a training thread finds a
copy that is due, or one that is under way; what was not issued then is issued by the next who comes by.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Optional

import torch

from capd_client.device import pieces
from capd_client.device.holding import Holding
from capd_client.device.pacing import Pace
from capd_client.device.pieces import Piece, Snapshot, cut
from capd_client.device.ring import Room
from capd_client.device.seam import Device, Event
from capd_client.inflight.queue import Queue
from capd_client.process.signals import is_interruption
from capd_client.protocol.counter_page import DropReason

__all__ = ["AHEAD_NBYTES", "ISSUE_NBYTES", "Transfers"]

# Pieces are issued while less than this is under way. A copy engine serves what is queued first: whoever else copies
# waits for it (128 MiB: 2.4 ms at 55 GB/s). With less the link is idle where the pump comes late by a few milliseconds.
AHEAD_NBYTES = 128 << 20
_AHEAD_PIECES = 256  # with more the driver's queue may be full, and a call waits
# A training thread issues what is due from so many bytes on: for less the calls cost it more than the link's time.
ISSUE_NBYTES = 4 << 20


class Transfers:
    """Brings snapshots of one device home.

    host: the arena, uint8 [bytes]. pace: limits the bytes per second. holding: is told of what it has lent.
    piece_nbytes: of one copy, None: as is best.
    """

    def __init__(
        self,
        device: Device,
        queue: Queue,
        host: torch.Tensor,
        pace: Pace,
        holding: Holding,
        piece_nbytes: Optional[int] = None,
    ) -> None:
        self._device = device
        self._queue = queue
        self._host = host
        self._pace = pace
        self._holding = holding
        self._piece_nbytes = piece_nbytes
        self.lock = threading.RLock()
        self._handing = threading.RLock()  # a signal handler may capture, too
        self._due: list[Snapshot] = []
        self._issued = 0  # bytes of the first due one that are under way
        self._under_way: list[Piece] = []
        # Of those under way: how many are known to be done and not finished yet, the oldest ones.
        self._landed = 0
        self._ahead = 0  # bytes under way, without those
        self._handed_nbytes = 0  # ever, as the next two
        self._begun_nbytes = 0
        self._last: Optional[Snapshot] = None  # what was handed over last, as long as it is not home
        self._other: Optional[Snapshot] = None  # the last one from before the stream changed, in the same way
        self._freed = 0  # of those under way: how many have given their room back already, the oldest ones
        self.gate: Optional[Piece] = None  # the last of those that have, as long as it is not done
        self.gates = 0  # how often there was a new one
        self._slow: Optional[Piece] = None  # one that the pump issues without the lock, as that takes a while
        self.error: Optional[Exception] = None  # met on a training thread; the pump fails of it
        self._pumping = False
        self.paused = False  # training threads are to leave everything to the pump
        self.failed = False

    @property
    def _piece(self) -> int:
        return self._piece_nbytes or pieces.PIECE_NBYTES

    @property
    def _most(self) -> int:
        """Bytes that may be under way; two pieces in any case, or the link would be idle between them."""
        return max(AHEAD_NBYTES, 2 * (self._piece_nbytes or 0))

    @property
    def pending(self) -> bool:
        """Whether copies are under way or due."""
        return bool(self._due or self._under_way)

    @property
    def waiting(self) -> bool:
        """Whether enough is due to be issued at once, or an error to be told. A look without the lock."""
        due_nbytes = self._handed_nbytes - self._begun_nbytes
        return (due_nbytes >= ISSUE_NBYTES and not self._pace.left_s) or self.error is not None

    @property
    def left_s(self) -> float:
        """Seconds until the pace allows a copy; 0: now, or nothing waits for it."""
        return self._pace.left_s if self._due else 0.0

    def oldest(self) -> Optional[Event]:
        """What tells that the oldest copy is done; None where none is under way."""
        with self.lock:
            return self._under_way[0].done if self._under_way else None

    # -- training threads -------------------------------------------------------------------------------

    def add(self, snapshot: Snapshot) -> bool:
        """Take a snapshot over; False once the device has failed: nobody would bring it home."""
        with self._handing:
            if self.failed:
                return False
            if self._last is not None and self._last.stream != snapshot.stream:
                self._other = self._last
            self._last = snapshot
            self._handed_nbytes += snapshot.nbytes
            self._due += (snapshot,)
            snapshot.capture.thread = 0
        return True

    def push(self) -> None:
        """Issue what is due, if that is enough, and the pump is not at it."""
        if self.waiting and self.error is None and not (self._pumping or self.paused or self.inside()):
            self._issue_here(self._most, count=1)

    def follows(self, stream: int) -> bool:
        """Whether all that is pending is of `stream`, which then comes after it anyway: it may wait for any of it."""
        last = self._last
        return last is None or (last.stream == stream and self._other is None)

    def issue_all(self) -> None:
        """Issue all that is due, however much is under way. With the lock held, on a training thread."""
        self._issue_here(1 << 62, count=1 << 62)

    def _issue_here(self, most: int, *, count: int) -> None:
        try:
            with self.lock:
                if self._ahead >= most:
                    self._look()
                if self._device.can_issue():
                    self._issue(most, count, pumping=False)
        except Exception as error:
            if is_interruption(error):
                raise
            self.error = error.with_traceback(None)  # which holds what the job's frames hold

    def free_oldest(self, stream: int) -> bool:
        """Give the room of the oldest copy back that has not done so, though it may not be done: see `gate`.

        Whoever takes that room on `stream` has it wait for the gate. False where nothing is left that the stream comes
        after anyway. With the lock held.
        """
        if self._freed == len(self._under_way):
            return False
        piece = self._under_way[self._freed]
        if piece.done is None or any(other != stream for other in piece.streams):
            return False
        self.gates += 1
        self.gate = piece
        self._freed += 1
        _give(room for snapshot in piece.ends for room in snapshot.room)
        return True

    def free_landed(self) -> bool:
        """The same where the copy is done: nobody has to wait. A pump that is late has not done it."""
        if self.paused:
            return False
        with self.lock:
            self._look()
            if self._freed >= self._landed:
                return False
            piece = self._under_way[self._freed]
            self._freed += 1
        _give(room for snapshot in piece.ends for room in snapshot.room)
        return True

    def inside(self) -> bool:
        """Whether this thread has a lock of these: a signal handler that asks has interrupted it here."""
        # Not in their stubs.
        return bool(self.lock._is_owned() or self._handing._is_owned())  # type: ignore[attr-defined]

    # -- the pump ---------------------------------------------------------------------------------------

    def advance(self) -> int:
        """Finish the copies that are done, issue those that are due; returns how many captures became ready."""
        if self.error is not None:
            raise self.error
        finished = 0
        self._pumping = True
        with self.lock:
            while self._under_way:
                done = self._under_way[0].done
                if done is None or not self._device.query(done):
                    break
                finished += self._finish(self._under_way[0])
            self._issue(self._most, 1 << 62, pumping=True)
        self._pumping = False
        slow = self._slow
        if slow is not None:
            self._slow = None
            self._start(slow)
        return finished

    def fail(self) -> None:
        """After a device error: drop everything under way and every later capture as internal errors, once each.

        Where copies may still be under way the slots are given to nobody else.
        """
        with self.lock, self._handing:
            self.failed = True
            for piece in self._under_way:
                for snapshot in piece.ends:
                    self._queue.abandon(snapshot.capture, DropReason.INTERNAL)
            if self._issued:
                self._queue.abandon(self._due.pop(0).capture, DropReason.INTERNAL)
            for snapshot in self._due:
                self._queue.abort(snapshot.capture, DropReason.INTERNAL)
            self._holding.clear()
            self._under_way.clear()
            self._due.clear()
            self._begun_nbytes = self._handed_nbytes
            self._last = self._other = None
            self._freed, self._landed, self.gate = 0, 0, None
            self._pace.leave(self)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing is issued or finished as long as this lasts; training threads do not wait for its end."""
        self.paused = True
        try:
            with self.lock:
                yield
        finally:
            self.paused = False

    # -- both, with the lock held -----------------------------------------------------------------------

    def _look(self) -> None:
        """Count what is done and not finished yet: a pump that is late keeps nobody from issuing more."""
        while self._landed < len(self._under_way):
            piece = self._under_way[self._landed]
            if piece.done is None or not self._device.query(piece.done):
                break
            nbytes = piece.nbytes
            self._ahead -= nbytes
            self._landed += 1

    def _issue(self, most: int, count: int, *, pumping: bool) -> None:
        """Start up to `count` pieces of what is due while less than `most` bytes are under way, and as the pace allows.

        Left to the pump are rows to be computed first, and copies to memory that is not locked: those wait.
        """
        newest = self._under_way[-1] if self._under_way else None
        if newest is not None and newest.pinned and newest.done is None:  # a signal handler has raised before
            self._start(newest)
        while count > 0 and self._due and self._ahead < most and self._pace.ask(self):
            if len(self._under_way) - self._landed >= _AHEAD_PIECES:
                break
            count -= 1
            piece = cut(self._due, self._issued, self._device.part_end, self._piece)
            if not self._may_start(piece, pumping):
                break
            ends, nbytes = len(piece.ends), piece.nbytes
            issued = 0 if ends else self._issued + nbytes
            # Of a held tensor that has changed nothing more is copied.
            begun = nbytes or (piece.ends[0].nbytes - self._issued if ends else 0)
            self._under_way += (piece,)
            self._issued = issued
            del self._due[:ends]
            self._ahead += nbytes
            self._begun_nbytes += begun
            if not piece.pinned:
                self._slow = piece
                break
            self._start(piece)
        if not self._due:
            self._pace.leave(self)

    def _may_start(self, piece: Piece, pumping: bool) -> bool:
        if not piece.pinned:
            # Until its tensor is there the thread would wait for all that is queued before it.
            return pumping and not self._under_way and all(self._device.query(event) for event in piece.after)
        return pumping or not piece.segments

    def _start(self, piece: Piece) -> None:
        if piece.segments:
            self._device.compute(piece.segments, piece.after)
            piece.after = ()
        self._device.fetch(piece, self._host)
        done = self._device.fetched()
        self._pace.spend(self, piece.nbytes)
        piece.done = done

    def _finish(self, piece: Piece) -> int:
        if self._landed:
            self._landed -= 1
        else:
            self._ahead -= piece.nbytes
        self._device.recycle(piece.done)
        for snapshot in piece.ends:
            if snapshot.intact:
                self._queue.ready(snapshot.capture)
            else:
                self._queue.abort(snapshot.capture, DropReason.MUTATED)
                if snapshot.lent:
                    self._holding.changed(snapshot.capture.definition.key)
            if snapshot.lent:
                self._holding.give(snapshot.nbytes)
            self._device.recycle(snapshot.ready)
            self._forget(snapshot)
        _give(room for snapshot in piece.ends for room in (*snapshot.room, *snapshot.kept))
        if self.gate is piece:
            self.gate = None
        self._freed = max(0, self._freed - 1)
        del self._under_way[0]
        return len(piece.ends)

    def _forget(self, snapshot: Snapshot) -> None:
        with self._handing:
            if snapshot is self._last:
                self._last = None
            if snapshot is self._other:
                self._other = None


def _give(rooms: Iterable[Room]) -> None:
    for ring, slots in rooms:
        ring.give(slots)
