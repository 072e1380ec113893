"""The shell of one rank's Session: its lock and its arena, between the pipeline and the sender.

Three kinds of threads call it: readers of connections, the threads of the pipeline (`committed`, `refused`), and the
daemon's clock, which asks for rows to persist. The pipeline's calls hold the state lock for microseconds and never
wait for a peer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from capd.errors import ProtocolError
from capd.server.net.sender import Sender
from capd.server.pipeline.jobs import Loss, RecordJob
from capd.server.process import RETURN_S, RankProcess
from capd.server.rank.accounting import PageCounters, SessionTotals, reconcile, without_given_up
from capd.server.rank.arena import Arena
from capd.server.rank.checks import check_put
from capd.server.rank.journal import Journal
from capd.server.rank.orders import Orders
from capd.server.rank.session import Phase, Session
from capd.server.rank.steering import RunSteering
from capd.store.catalog.rows import SessionRow
from capd.store.format.ranges import RangeSet
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import MAX_INDEX
from capd_client.protocol.messages import DaemonMessage, Descriptor, Hello, Put, Reject

__all__ = ["MAX_IN_WORK_NBYTES", "RankSession"]

logger = logging.getLogger(__name__)

# The memory of one rank's captures in the pipeline (8192 plain ones). At this limit, the rank's socket is not read.
MAX_IN_WORK_NBYTES = 16 << 20
_ROOM_S = 1.0


class RankSession:
    """The rank of one client uuid, and the pipeline's sink for its captures."""

    def __init__(
        self,
        session: Session,
        hello: Hello,
        arena: Arena,
        submit: Callable[..., None],
        forget: Callable[[bytes, int], None],
        started_ns: int,
        steering: RunSteering,
        shift: int = 0,
        continued: int = 0,
    ) -> None:
        """Start the session of a rank.

        Args:
            session: Its state.
            hello: Its first HELLO.
            arena: Its arena.
            submit: Hands jobs to the pipeline.
            forget: Releases parts of a record in the pipeline.
            started_ns: When the session began.
            steering: The steering of its run.
            shift: What is added to the attempt of its captures.
            continued: The records that the run held when the rank's job continued it; 0 if the job began it.
        """
        self.session = session
        self.client, self.run_id = session.client, session.run_id
        self.hello = hello
        self.orders = Orders(steering)
        self.started_ns = started_ns
        self.shift, self.continued = shift, continued
        self.ended_ns: int | None = None
        # The text of the last refusal as disk_full.
        self.why_full = ""
        self._submit, self._forget = submit, forget
        self._arena: Arena | None = arena
        # Used once the arena is released.
        self._last_page = PageCounters()
        self._last_begun = 0
        self._sender: Sender | None = None
        self._recovering = False
        # Captures that arrived and were submitted.
        self.taken = 0
        # The captures among them that came from the journal of a rank that was gone.
        self.recovered = 0
        self.process = RankProcess()
        # The command line of its process; "" if it is unknown.
        self.command = ""
        # One connection at a time submits captures.
        self._intake = threading.Lock()
        self._lock = threading.Lock()
        self._outcome = threading.Condition(self._lock)

    # From the rank's connections

    def connect(self, hello: Hello, arena: Arena, process: int | None) -> Reject | None:
        """Let a connection speak for the session, or return why not. An older connection is ended.

        On success the session owns `process`, a pidfd. None: the process is unknown.
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
        """Return the arena of `fd`: the current mapping if it is the same memory, else a new one. Raises ArenaError"""
        arena = self._arena
        known = arena is not None and arena.nbytes == nbytes and arena.is_same_memory(fd)
        return arena if arena is not None and known else Arena(fd, nbytes)

    def put(self, connection: int, message: Put) -> bool:
        """Check a batch and submit its new captures. Return False if another connection took over.

        Raises:
            ProtocolError: The sequences of the batch do not ascend.
        """
        arena = self._arena
        # None: the rank was released.
        if arena is None:
            return False
        if self.shift:
            for descriptor in message.items:
                moment = descriptor.moment
                descriptor.moment = replace(moment, attempt=min(MAX_INDEX, moment.attempt + self.shift))
        items, rows = check_put(message, self.session.keys, self.session.key_problems, arena)
        with self._intake:
            with self._lock:
                if connection != self.session.connection:
                    return False
                new = self.session.put(items)
                abandoned = self.session.take_abandoned()
                self.taken += sum(item.ends_record for item, _ in new)
                self._wake_sender()
            jobs, now = [], time.monotonic()
            for item, define in new:
                data = arena.slice(item.offset, item.nbytes)
                row = rows.get(item.sequence)
                jobs.append(
                    RecordJob(
                        self.run_id, self.client, item.sequence, define, item, data, self, row, since=now
                    )
                )
            self._submit(*jobs)
            for record in abandoned:
                self._forget(self.client, record)
        return True

    def is_pressed(self, items: Sequence[Descriptor]) -> bool:
        """Return whether these descriptors show that the rank's arena fills up."""
        arena = self._arena
        return arena is not None and arena.fills_up(max((item.offset for item in items), default=0))

    def apply(self, connection: int, act: Callable[[Session], None]) -> bool:
        """Apply `act` to the state. Return False if another connection took over."""
        with self._lock:
            if connection != self.session.connection:
                return False
            act(self.session)
            self._wake_sender()
            return True

    def wait_for_room(self, timeout_s: float) -> bool:
        """If MAX_IN_WORK_NBYTES is reached, wait until half of it is free. Return whether there is room."""
        with self._lock:
            if self.session.in_work_nbytes < MAX_IN_WORK_NBYTES:
                return True
            return self._outcome.wait_for(self._has_room, timeout_s)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no capture of this rank is in work. Return whether that is so."""
        with self._lock:
            return self._outcome.wait_for(lambda: not self.session.in_work, timeout_s)

    def take_replies(self, connection: int) -> list[DaemonMessage]:
        """Hand over the replies that wait for `connection`; none if another connection took over."""
        with self._lock:
            mine = connection == self.session.connection
            return [*self.session.take_replies(), *self.orders.take()] if mine else []

    def end(self, connection: int) -> bool:
        """Take a BYE. Return False if another connection took over."""
        ended = self.apply(connection, Session.end)
        if ended:
            self.ended_ns = time.time_ns()
        return ended

    def disconnect(self, connection: int) -> None:
        """Note that the connection is gone. The process decides whether the rank is."""
        with self._lock:
            if connection == self.session.connection:
                self._sender = None
                self.process.lost()
                self.session.disconnect(connection)
        self.check_process(grace_s=None)

    # From tools

    def order(self, act: Callable[[Orders], None]) -> None:
        """Apply `act` to the rank's orders. A rank without a connection gets them on its next one."""
        with self._lock:
            act(self.orders)
            self._wake_sender()

    @property
    def begun(self) -> int:
        """The number of iterations that the rank has begun: 1 + the current one, 0 before the first."""
        return 0 if (arena := self._arena) is None else arena.begun()

    @property
    def last_iteration(self) -> int | None:
        """The iteration that the rank was in, also after its arena was released; None before the first."""
        begun = self.begun or self._last_begun
        return begun - 1 if begun else None

    @property
    def reached(self) -> int:
        """The iteration that the rank is in, or an earlier one with captures on their way; -1 before the first."""
        with self._lock:
            session, last = self.session, self.last_iteration
            iterations = [-1 if last is None else last]
            iterations += [item.moment.iteration for item, _ in session.in_work.values()]
            if self._totals().in_flight > len(session.held) + session.records_in_work:
                # What the rank has not sent yet is not older than what it sent last.
                iterations.append(session.newest_iteration)
        return min(iterations)

    @property
    def alive(self) -> bool:
        """Whether the rank is there, with a connection or between two of them."""
        return self.session.phase in (Phase.LIVE, Phase.ORPHANED)

    @property
    def died(self) -> bool:
        """Whether the process is gone without a BYE."""
        return self.session.phase is Phase.DIED

    # From the pipeline's threads

    def committed(self, sequences: Sequence[int]) -> None:
        """Note that the records are committed and their slots free."""
        with self._lock:
            for sequence in sequences:
                self.session.committed(sequence)
            self._after_outcome()

    def held(self, sequence: int) -> None:
        """Note that the flight recorder has the record and its slot is free."""
        with self._lock:
            self.session.hold(sequence)
            self._after_outcome()

    def kept(self, record: int) -> None:
        """Note that a held record is committed."""
        with self._lock:
            self.session.keep(record)

    def let_go(self, reason: DropReason, records: RangeSet, losses: Iterable[Loss]) -> None:
        """Note that held records will never be committed. losses: what they were, by key and iteration."""
        with self._lock:
            self.session.lose(reason, records)
            for define, iteration, count, nbytes in losses:
                self.session.ledger.let_go(define, reason, iteration, count, nbytes)

    def refused(self, sequence: int, reason: DropReason, message: str) -> None:
        """Note that the record will never be committed and its slot is free."""
        with self._lock:
            self.session.refused(sequence, reason, message)
            if reason is DropReason.DISK_FULL:
                self.why_full = message
            self._after_outcome()

    # From the daemon's clock

    def check_process(self, grace_s: float | None, return_s: float = RETURN_S) -> None:
        """Note the death of a rank, as `RankProcess.is_given_up` decides. A rank that comes back is accepted again.

        A rank that still has a connection is disconnected first. Its reader takes everything that arrived. It does not
        wait for the rest of a frame, which may never come: a forked child can keep the socket open.
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
            # A process that may still live could reuse the slot of a part, but no other slot.
            parts = self.process.ended
        work = partial(self._recover, connection, journal, parts)
        try:
            threading.Thread(target=work, name=f"capd-recover-{self.hello.rank}", daemon=True).start()
        except RuntimeError:
            # The system allows no further thread.
            work()

    def wait_recovered(self, timeout_s: float) -> bool:
        """Wait until no recovery is in progress. Return whether that is so."""
        with self._lock:
            return self._outcome.wait_for(lambda: not self._recovering, timeout_s)

    def row(self) -> SessionRow:
        """Return the session's counters as the catalog stores them."""
        with self._lock:
            session, gone = self.session, not self.alive
            totals = self._totals()
            return SessionRow(
                client=session.client,
                rank=self.hello.rank,
                attempt=self.hello.attempt + self.shift,
                host=self.hello.host,
                pid=self.hello.pid,
                started_ns=self.started_ns,
                ended_ns=self.ended_ns if gone else None,
                state=session.phase.value if gone else "live",
                end=self.process.end if self.died else "",
                command=self.command,
                offered=totals.offered,
                committed=totals.committed,
                in_flight=totals.in_flight,
                dropped={reason.value: count for reason, count in totals.dropped.items()},
                drops=session.ledger.rows(),
                shift=self.shift,
                world_size=self.hello.world_size,
                let_go={reason.value: count for reason, count in session.let_go_counts.items()},
            )

    def totals(self) -> tuple[str, SessionTotals]:
        """Return the state ("live", "ended" or "died") and counters that never go down.

        They are those of `row`, except that a rank which is here has given up nothing: the daemon may still commit it.
        """
        with self._lock:
            session = self.session
            if not self.alive:
                return session.phase.value, self._totals()
            page = without_given_up(self._counters())
            return "live", reconcile(
                page, len(session.done), session.refused_counts, in_work=None, let_go=session.let_go_counts
            )

    @property
    def arena_nbytes(self) -> int:
        """The size of the rank's arena in bytes; 0 when it is released."""
        return 0 if (arena := self._arena) is None else arena.nbytes

    @property
    def arena_used(self) -> int:
        """The bytes of its captures that arrived and are not committed. Each holds a slot of the arena."""
        return self.session.arena_nbytes

    @property
    def connected(self) -> bool:
        """Whether a connection speaks for the session now."""
        return self.session.phase is Phase.LIVE

    @property
    def lost(self) -> bool:
        """Whether its connection is gone and may come back."""
        return self.session.phase is Phase.ORPHANED

    @property
    def busy(self) -> bool:
        """Whether the rank is connected, in recovery, or has captures in work or held."""
        session = self.session
        return session.phase is Phase.LIVE or bool(session.in_work or session.held) or self._recovering

    @property
    def at_rest(self) -> bool:
        """Whether the rank is gone for good and the outcome of everything that it sent is known."""
        with self._lock:
            return self.session.at_rest

    def release_arena(self) -> None:
        """Give back the arena and keep its last counters. The rank is at rest.

        Other objects may still refer to this one, such as the pipeline's last job. They then keep no memory of the
        arena.
        """
        with self._lock:
            self._last_page = self._counters()
            self._last_begun = self.begun
            self._arena = None

    def release(self) -> None:
        """Give back the arena and the process handle. The rank is at rest, and its last row is taken."""
        self.release_arena()
        with self._lock:
            self.process.follow(None)

    # The recovery of a rank that is gone, in a thread of its own

    def _recover(self, connection: int, journal: Journal, parts: bool) -> None:
        """Submit the ready captures of the arena as if the rank had PUT them. Then the rank is dead.

        A capture that was already sent is committed, refused or in work, and a repeated PUT creates no second record.
        The recovery therefore need not know how far the rank had come.

        Args:
            connection: The rank's last connection. The recovery ends if another one takes over.
            journal: The journal, which names the ready slots.
            parts: Also take parts of large records.
        """
        before = self.taken
        try:
            self._put_found(connection, journal, parts)
        except (ProtocolError, OSError) as error:
            logger.warning("the journal of rank %d cannot be read further: %s", self.hello.rank, error)
        except Exception:
            # This is the outermost loop of the thread: the session must not wait forever.
            logger.exception("the journal of rank %d cannot be read further", self.hello.rank)
        finally:
            with self._lock:
                self._recovering = False
                self.recovered += self.taken - before
                if connection == self.session.connection and self.session.phase is Phase.ORPHANED:
                    self._die()
                self._outcome.notify_all()

    def _put_found(self, connection: int, journal: Journal, parts: bool) -> None:
        found, keys = journal.find(), self.session.keys
        for define, nbytes in journal.definitions(found.keys - keys.keys()):
            add = partial(Session.define, message=define, frame_nbytes=nbytes)
            if define.id not in keys and not self.apply(connection, add):
                return
        for batch in journal.batches(found):
            items = [item for item in batch if item.key_id in keys and (parts or item.part is None)]
            if items and not self.put(connection, Put(items)):
                return
            while not self.wait_for_room(_ROOM_S):
                pass

    # Inside; all with the lock held

    def _totals(self) -> SessionTotals:
        session = self.session
        in_work = None if self.alive else session.records_in_work + len(session.held)
        return reconcile(
            self._counters(),
            len(session.done),
            session.refused_counts,
            in_work=in_work,
            let_go=session.let_go_counts,
        )

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
