"""The copies of one device: due, under way or done, in the order in which the captures were handed over.

A training thread issues copies itself if enough is due, so the link does not wait for another thread. The copy pump
(capd_client.device.pump) issues the rest and finishes copies that are done. One lock guards both. A training thread
does not wait for the pump to issue.

Each list is changed by one statement that calls nothing. If a signal handler raises in a training thread, every copy is
either due or under way. The next thread that issues copies also issues the one that the handler interrupted.
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

# Pieces are issued while fewer bytes than this are under way. A copy engine serves its queue in order, so any other
# copy waits for these bytes (128 MiB: 2.4 ms at 55 GB/s). With fewer bytes, the link is idle if the pump is a few
# milliseconds late.
AHEAD_NBYTES = 128 << 20
# With more pieces, the driver's queue may be full and a call waits.
_AHEAD_PIECES = 256
# From this many due bytes on, a training thread issues them. For fewer, the calls cost it more than the link's time.
ISSUE_NBYTES = 4 << 20


class Transfers:
    """The copies that take the snapshots of one device to the arena."""

    def __init__(
        self,
        device: Device,
        queue: Queue,
        host: torch.Tensor,
        pace: Pace,
        holding: Holding,
        piece_nbytes: Optional[int] = None,
    ) -> None:
        """Start without copies.

        Args:
            device: The device.
            queue: The in-flight captures of the session.
            host: The arena, uint8 [bytes].
            pace: The limit on bytes per second.
            holding: Notified when tensors that it has lent are released.
            piece_nbytes: The bytes of one copy; None: the default.
        """
        self._device = device
        self._queue = queue
        self._host = host
        self._pace = pace
        self._holding = holding
        self._piece_nbytes = piece_nbytes
        self.lock = threading.RLock()
        # Re-entrant, because a signal handler of the job may capture.
        self._handing = threading.RLock()
        self._due: list[Snapshot] = []
        # The bytes of the first due snapshot that are under way.
        self._issued = 0
        self._under_way: list[Piece] = []
        # The number of copies under way that are done but not finished yet. They are the oldest ones.
        self._landed = 0
        # The bytes under way, without the landed copies.
        self._ahead = 0
        # Sums over the whole life: the bytes handed over, and the bytes whose copies have begun.
        self._handed_nbytes = 0
        self._begun_nbytes = 0
        # The last snapshot that was handed over, until its copy is finished.
        self._last: Optional[Snapshot] = None
        # The last snapshot from before the stream changed, until its copy is finished.
        self._other: Optional[Snapshot] = None
        # The number of copies under way whose room is already free. They are the oldest ones.
        self._freed = 0
        # The last of the copies whose room is already free, until it is done.
        self.gate: Optional[Piece] = None
        # How often there was a new gate.
        self.gates = 0
        # A piece that the pump issues without the lock, because that takes a while.
        self._slow: Optional[Piece] = None
        # An error of a training thread. The pump then fails with it.
        self.error: Optional[Exception] = None
        self._pumping = False
        # Training threads leave everything to the pump.
        self.paused = False
        self.failed = False

    @property
    def _most(self) -> int:
        """The bytes that may be under way. At least two pieces, because the link would be idle between two copies."""
        return max(AHEAD_NBYTES, 2 * (self._piece_nbytes or 0))

    @property
    def pending(self) -> bool:
        """Whether copies are under way or due."""
        return bool(self._due or self._under_way)

    @property
    def waiting(self) -> bool:
        """Whether enough is due to be issued at once, or an error waits, as seen without the lock."""
        due_nbytes = self._handed_nbytes - self._begun_nbytes
        return (due_nbytes >= ISSUE_NBYTES and not self._pace.left_s) or self.error is not None

    @property
    def left_s(self) -> float:
        """The seconds until the pace allows a copy; 0: now, or nothing waits for the pace."""
        return self._pace.left_s if self._due else 0.0

    def oldest(self) -> Optional[Event]:
        """Return the event of the oldest copy; None if none is under way."""
        with self.lock:
            return self._under_way[0].done if self._under_way else None

    # -- training threads -------------------------------------------------------------------------------

    def add(self, snapshot: Snapshot) -> bool:
        """Take over a snapshot. Return False if the device has failed, because nobody would copy it."""
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
        """Issue due copies if there are enough and the pump is not doing it."""
        if self.waiting and self.error is None and not (self._pumping or self.paused or self.inside()):
            self._issue_here(self._most, count=1)

    def follows(self, stream: int) -> bool:
        """Return whether all pending snapshots are of `stream`. It follows all of them then and may wait for any."""
        last = self._last
        return last is None or (last.stream == stream and self._other is None)

    def issue_all(self) -> None:
        """Issue all due copies, however much is under way. A training thread calls it with the lock held."""
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
            # A traceback would keep the objects of the job's frames alive.
            self.error = error.with_traceback(None)

    def free_oldest(self, stream: int) -> bool:
        """Free the room of the oldest copy that still has it, even if the copy is not done; see `gate`.

        A stream that takes this room must wait for the gate. The caller holds the lock.

        Returns:
            False if no copy is left that `stream` follows anyway.
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
        """Free the room of the oldest copy that is done. Nobody has to wait for it. A late pump has not freed it."""
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
        """Return whether this thread holds one of the locks. If so, a signal handler interrupted it there."""
        # The stubs of RLock lack the method.
        return bool(self.lock._is_owned() or self._handing._is_owned())  # type: ignore[attr-defined]

    # -- the pump ---------------------------------------------------------------------------------------

    def advance(self) -> int:
        """Finish copies that are done and issue due ones. Return the number of captures that became ready."""
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
        """After a device error, drop all copies and every later capture as internal errors, each once.

        If a copy may still be under way, its slot is given to nobody else.
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

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Issue and finish nothing within this context. Training threads do not wait for its end."""
        self.paused = True
        try:
            with self.lock:
                yield
        finally:
            self.paused = False

    # -- both, with the lock held -----------------------------------------------------------------------

    def _look(self) -> None:
        """Count copies that are done but not finished yet, so that a late pump keeps nobody from issuing more."""
        while self._landed < len(self._under_way):
            piece = self._under_way[self._landed]
            if piece.done is None or not self._device.query(piece.done):
                break
            nbytes = piece.nbytes
            self._ahead -= nbytes
            self._landed += 1

    def _issue(self, most: int, count: int, *, pumping: bool) -> None:
        """Start up to `count` due pieces while fewer than `most` bytes are under way and the pace allows it.

        Two kinds are left to the pump, because they wait: pieces with rows to compute first, and copies to memory that
        is not locked.
        """
        newest = self._under_way[-1] if self._under_way else None
        # A signal handler raised before this piece was started.
        if newest is not None and newest.pinned and newest.done is None:
            self._start(newest)
        while count > 0 and self._due and self._ahead < most and not self._pace.left_s:
            if len(self._under_way) - self._landed >= _AHEAD_PIECES:
                break
            count -= 1
            piece_nbytes = self._piece_nbytes or pieces.PIECE_NBYTES
            piece = cut(self._due, self._issued, self._device.part_end, piece_nbytes)
            if not self._may_start(piece, pumping):
                break
            ends, nbytes = len(piece.ends), piece.nbytes
            issued = 0 if ends else self._issued + nbytes
            # Nothing more is copied from a held tensor that has changed.
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

    def _may_start(self, piece: Piece, pumping: bool) -> bool:
        if not piece.pinned:
            # Until its tensor is ready, the thread would wait for everything that is queued before it.
            return pumping and not self._under_way and all(self._device.query(event) for event in piece.after)
        return pumping or not piece.segments

    def _start(self, piece: Piece) -> None:
        if piece.segments:
            self._device.compute(piece.segments, piece.after)
            piece.after = ()
        self._device.fetch(piece, self._host)
        done = self._device.fetched()
        self._pace.spend(piece.nbytes)
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
        _give(room for snapshot in piece.ends for room in (*snapshot.room, *snapshot.row_room))
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
