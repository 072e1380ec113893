"""The shell around one rank's Session: its lock, its arena, the pipeline behind it, the sender before it.

Reader threads call in from one side, the pipeline's threads from the other (`committed`, `refused`), and
the daemon's clock asks for rows to persist. The pipeline's calls hold the state lock for microseconds and
never wait for a peer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from capd.server.net.sender import Sender
from capd.server.pipeline.jobs import RecordJob
from capd.server.process import RETURN_S, RankProcess
from capd.server.rank.accounting import PageCounters, reconcile
from capd.server.rank.arena import Arena
from capd.server.rank.left_behind import begin_recovery
from capd.server.rank.orders import Orders
from capd.server.rank.put_batch import check_put
from capd.server.rank.session import Phase, Session
from capd.server.rank.steering import RunSteering
from capd.store.catalog.rows import SessionRow
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.messages import DaemonMessage, Descriptor, Hello, Put, Reject

__all__ = ["MAX_IN_WORK_NBYTES", "RankSession"]

# Memory of one rank's captures in the pipeline (8192 plain ones); beyond it the rank's socket is not read.
MAX_IN_WORK_NBYTES = 16 << 20


class RankSession:
    """One client uuid: the pipeline's sink for its captures."""

    def __init__(
        self,
        session: Session,
        hello: Hello,
        arena: Arena,
        submit: Callable[..., None],
        forget: Callable[[bytes, int], None],
        started_ns: int,
        steering: RunSteering,
    ) -> None:
        self.session = session
        self.hello = hello
        self.orders = Orders(steering)
        self.started_ns = started_ns
        self.ended_ns: int | None = None
        self.why_full = ""  # what the last refusal as disk_full said
        self._submit, self._forget = submit, forget
        self._arena: Arena | None = arena
        self._last_page = PageCounters()  # once the arena is released
        self._sender: Sender | None = None
        self._recovering = False
        self.taken = 0  # captures that came here and were submitted
        self.recovered = 0  # of these, by the journal in the arena of a rank that was gone
        self.process = RankProcess()
        self._intake = threading.Lock()  # one connection at a time hands captures on
        self._lock = threading.Lock()
        self._outcome = threading.Condition(self._lock)

    # From the rank's connections

    def connect(self, hello: Hello, arena: Arena, process: int | None) -> Reject | None:
        """Let a connection speak for the session, or say why not.

        The connection it takes over from is ended. On success the session owns `process` (a pidfd).
        """
        with self._intake, self._lock:
            reject = self.session.connect(hello)
            if reject is not None:
                return reject
            before, self._sender = self._sender, None
            self.hello, self._arena, self.ended_ns = hello, arena, None
            self.process.follow(process)
            self._outcome.notify_all()
        if before is not None:
            before.disconnect()
        return None

    def attach(self, connection: int, sender: Sender) -> None:
        """Send the replies to `connection` through `sender` from now on."""
        with self._lock:
            if connection == self.session.connection:
                self._sender = sender
                self.orders.connected()
                self._wake_sender()

    def arena_of(self, fd: int, nbytes: int) -> Arena:
        """The arena behind `fd`: the mapping there is, if it is the same memory. Raises ArenaError."""
        arena = self._arena
        known = arena is not None and arena.nbytes == nbytes and arena.is_same_memory(fd)
        return arena if arena is not None and known else Arena(fd, nbytes)

    def put(self, connection: int, message: Put) -> bool:
        """Check a batch and submit what is new; False when another connection took over.

        Raises ProtocolError when the batch's sequences do not ascend.
        """
        arena = self._arena
        if arena is None:
            return False  # released
        items, rows = check_put(message, self.session.keys, self.session.key_problems, arena)
        with self._intake:
            with self._lock:
                if connection != self.session.connection:
                    return False
                new = self.session.put(items)
                abandoned = self.session.take_abandoned()
                self.taken += sum(item.ends_record for item, _ in new)
                self._wake_sender()
            jobs = []
            for item, define in new:
                data = arena.slice(item.offset, item.nbytes)
                row = rows.get(item.sequence)
                jobs.append(RecordJob(self.run_id, self.client, item.sequence, define, item, data, self, row))
            self._submit(*jobs)
            for record in abandoned:
                self._forget(self.client, record)
        return True

    def is_pressed(self, items: Sequence[Descriptor]) -> bool:
        """Whether these show that the rank's arena fills up."""
        arena = self._arena
        return arena is not None and arena.fills_up(max((item.offset for item in items), default=0))

    def tell(self, connection: int, act: Callable[[Session], None]) -> bool:
        """Apply `act` to the state; False when another connection took over."""
        with self._lock:
            if connection != self.session.connection:
                return False
            act(self.session)
            self._wake_sender()
            return True

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until less than half of MAX_IN_WORK_NBYTES is in work, if the limit was reached."""
        with self._lock:
            if self.session.in_work_nbytes < MAX_IN_WORK_NBYTES:
                return True
            return self._outcome.wait_for(self._has_room, timeout_s)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing of this rank is in work."""
        with self._lock:
            return self._outcome.wait_for(lambda: not self.session.in_work, timeout_s)

    def take_replies(self, connection: int) -> list[DaemonMessage]:
        """Replies that wait for `connection`; none once another one took over."""
        with self._lock:
            mine = connection == self.session.connection
            return [*self.session.take_replies(), *self.orders.take()] if mine else []

    def end(self, connection: int) -> bool:
        """BYE; False when another connection took over."""
        ended = self.tell(connection, Session.end)
        if ended:
            self.ended_ns = time.time_ns()
        return ended

    def disconnect(self, connection: int) -> None:
        """The connection is gone; whether the rank is, its process tells."""
        with self._lock:
            if connection == self.session.connection:
                self._sender = None
                self.process.lost()
                self.session.disconnect(connection)
        self.check_process(grace_s=None)

    # From tools

    def order(self, act: Callable[[Orders], None]) -> None:
        """Apply `act` to what the rank is to be told. Without a connection it hears of it on the next."""
        with self._lock:
            act(self.orders)
            self._wake_sender()

    @property
    def begun(self) -> int:
        """Iterations that it has begun: 1 + the current one, 0 before the first."""
        return 0 if (arena := self._arena) is None else arena.begun()

    @property
    def alive(self) -> bool:
        """The rank is there, as far as is known, with a connection or between two."""
        return self.session.phase in (Phase.LIVE, Phase.ORPHANED)

    @property
    def died(self) -> bool:
        """Its process is gone without a goodbye."""
        return self.session.phase is Phase.DIED

    # From the pipeline's threads

    def committed(self, sequences: Sequence[int]) -> None:
        """The records are real; their slots are free."""
        with self._lock:
            for sequence in sequences:
                self.session.committed(sequence)
            self._after_outcome()

    def refused(self, sequence: int, reason: DropReason, message: str) -> None:
        """The record will never be; its slot is free."""
        with self._lock:
            self.session.refused(sequence, reason, message)
            if reason is DropReason.DISK_FULL:
                self.why_full = message
            self._after_outcome()

    # From the daemon's clock

    def check_process(self, grace_s: float | None, return_s: float = RETURN_S) -> None:
        """Note the death of a rank, as far as `RankProcess.is_given_up` knows; one that comes back is taken in again.

        One that still has a connection is disconnected first: its reader takes what had arrived, and does not
        wait for the rest of a frame that will never come, because a forked child keeps the socket open.
        """
        with self._lock:
            if self.session.phase is Phase.LIVE:
                if self._sender is not None and self.process.ended:
                    self._sender.disconnect()
                return
            if self.session.phase is not Phase.ORPHANED or self._recovering:
                return
            if not self.process.is_given_up(grace_s, return_s):
                return
            connection = self.session.connection
            journal = None if self._arena is None else self._arena.journal()
            if connection is None or journal is None:
                self._die()
                return
            self._recovering = True
            # What is not known to be gone might still use the slot of a part again, but of nothing else.
            parts = self.process.ended
        begin_recovery(self, connection, journal, parts=parts)

    def end_recovery(self, connection: int, count: int) -> None:
        """What was ready in the arena is submitted, `count` captures that had not been sent: the rank is dead."""
        with self._lock:
            self._recovering = False
            self.recovered += count
            if connection == self.session.connection and self.session.phase is Phase.ORPHANED:
                self._die()
            self._outcome.notify_all()

    def wait_recovered(self, timeout_s: float) -> bool:
        """Wait until no recovery is under way."""
        with self._lock:
            return self._outcome.wait_for(lambda: not self._recovering, timeout_s)

    def row(self) -> SessionRow:
        """The session's counters as the catalog keeps them."""
        with self._lock:
            session, gone = self.session, not self.alive
            in_work = session.records_in_work if gone else None
            totals = reconcile(self._counters(), len(session.done), session.refused_counts, in_work=in_work)
            return SessionRow(
                client=session.client,
                rank=self.hello.rank,
                attempt=self.hello.attempt,
                host=self.hello.host,
                pid=self.hello.pid,
                started_ns=self.started_ns,
                ended_ns=self.ended_ns if gone else None,
                state=session.phase.value if gone else "live",
                end=self.process.end if self.died else "",
                offered=totals.offered,
                committed=totals.committed,
                in_flight=totals.in_flight,
                dropped={reason.value: count for reason, count in totals.dropped.items()},
                drops=session.ledger.rows(),
            )

    @property
    def client(self) -> bytes:
        """The client's uuid."""
        return self.session.client

    @property
    def run_id(self) -> str:
        """The run it writes to."""
        return self.session.run_id

    @property
    def ledger_version(self) -> int:
        """Grows with every change of the drop ledger."""
        return self.session.ledger.version

    @property
    def connected(self) -> bool:
        """A connection speaks for the session now."""
        return self.session.phase is Phase.LIVE

    @property
    def lost(self) -> bool:
        """Its connection is gone, and it may come back."""
        return self.session.phase is Phase.ORPHANED

    @property
    def busy(self) -> bool:
        """Connected, or something of it is in work, or being recovered."""
        return self.session.phase is Phase.LIVE or bool(self.session.in_work) or self._recovering

    @property
    def at_rest(self) -> bool:
        """The rank is gone for good and the outcome of everything it sent is known."""
        with self._lock:
            return self.session.at_rest

    def release(self) -> None:
        """The rank is at rest and its last row is taken: give back its arena and process handle.

        Whatever still refers to this object then (the pipeline's last job does) does not keep the memory.
        """
        with self._lock:
            self._last_page = self._counters()
            self._arena = None
            self.process.follow(None)

    # Inside; all with the lock held

    def _die(self) -> None:
        self.session.die()
        self.ended_ns = time.time_ns()

    def _counters(self) -> PageCounters:
        return self._last_page if self._arena is None else self._arena.counters()

    def _after_outcome(self) -> None:
        self._wake_sender()
        if self._has_room():
            self._outcome.notify_all()

    def _has_room(self) -> bool:
        return self.session.in_work_nbytes <= MAX_IN_WORK_NBYTES // 2

    def _wake_sender(self) -> None:
        if self._sender is not None and (self.session.has_replies or self.orders.waiting):
            self._sender.wake()
