"""The session of one rank, across its reconnects: a pure state machine without I/O.

There is one Session per client uuid. Its shell (`capd.server.rank.rank`) passes it messages and the pipeline's
outcomes under a lock. The shell hands the returned submissions to the pipeline and sends the collected replies.

    LIVE ── connection lost ──► ORPHANED ── process gone ──► DIED
     │  ◄──── newer connection of the same uuid ────┘            (a newer connection revives DIED, too)
     └──── BYE ──► ENDED

A sequence is new, in work, committed or refused. A new one is submitted once. A repeated one joins the work in
progress, or is answered again from its known outcome. A part is in work until its bytes are here, and the last part
until the record is committed. The record's own sequence is committed or refused, not those of its parts.

The connection ordinal decides which connection speaks for the session. An older or equal one is refused, and messages
of a superseded connection are ignored.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Protocol

from capd.server.rank.accounting import DAEMON_REASONS
from capd.server.rank.checks import Checked, define_problem
from capd.server.rank.ledger import Ledger
from capd.server.rank.parts import PartRefused, Unfinished
from capd.server.rank.replies import Replies
from capd.store.format.ranges import RangeSet
from capd_client.errors import ProtocolError
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.messages import DaemonMessage, Define, Descriptor, Drops, Flush, Hello, Reject
from capd_client.protocol.scalars import is_scalar
from capd_client.protocol.statistics_row import ROW_NBYTES

__all__ = ["MAX_DEFINE_NBYTES", "MAX_REFUSED", "RECORD_NBYTES", "History", "Phase", "Session"]

# Bytes of DEF frames kept per connection.
MAX_DEFINE_NBYTES = 64 << 20
# The most memory of a capture in work, without its elements, metadata and statistics row.
RECORD_NBYTES = 2 << 10
# The number of labels that are remembered.
MAX_QUANT_TYPES = 8
# The number of refusals that are remembered. If the PUT of an older one is repeated, the daemon tries it again.
MAX_REFUSED = 65_536

Submission = tuple[Descriptor, Define]


class History(Protocol):
    """The records of a client that the flight recorder has, and those that it has let go."""

    @property
    def held(self) -> RangeSet:
        """Their outcome is open."""

    @property
    def let_go(self) -> Mapping[DropReason, RangeSet]:
        """They are not committed, by reason."""


class Phase(enum.Enum):
    """The phase of a session's life."""

    LIVE = "live"
    ORPHANED = "orphaned"
    ENDED = "ended"
    DIED = "died"


class Session:
    """The state of one client uuid. Not thread-safe: the shell holds a lock around every call."""

    def __init__(
        self,
        client: bytes,
        run_id: str,
        committed: Iterable[tuple[int, int]] = (),
        history: History | None = None,
    ) -> None:
        """Start without a connection.

        Args:
            client: The uuid.
            run_id: The run.
            committed: The client's sequence ranges that are already in the store.
            history: The records of the client that the flight recorder had; None without one.
        """
        self.client = client
        self.run_id = run_id
        self.phase = Phase.ORPHANED
        self.connection: int | None = None
        self.keys: dict[int, Define] = {}
        # Key ids whose records cannot be stored, and why.
        self.key_problems: dict[int, str] = {}
        # The labels of all keys so far, at most MAX_QUANT_TYPES.
        self.quant_types: set[str] = set()
        self.done = RangeSet(committed)
        # Acknowledged records whose outcome is open, and those that are not committed.
        self.held = RangeSet() if history is None else history.held
        self.let_go: dict[DropReason, RangeSet] = {} if history is None else dict(history.let_go)
        self.refused_counts: dict[DropReason, int] = {}
        self.in_work: dict[int, Submission] = {}
        # The iteration of the capture that came last; -1 before the first.
        self.newest_iteration = -1
        # The memory of the captures in work here. Their elements stay in the arena.
        self.in_work_nbytes = 0
        # Their elements in the arena.
        self.arena_nbytes = 0
        self.ledger = Ledger()
        # The reason of each refused record, by sequence.
        self._refused: dict[int, DropReason] = {}
        self._unfinished = Unfinished()
        # Records with some parts here, of which no more parts will be taken.
        self._abandoned: list[int] = []
        self._define_nbytes = 0
        self._replies = Replies()

    # The connection

    def connect(self, hello: Hello) -> Reject | None:
        """Let this connection speak for the session, or return why not. It takes over from an older connection."""
        if self.connection is not None and hello.connection <= self.connection:
            return Reject(
                "superseded",
                f"connection {hello.connection} of this client is not newer than its connection {self.connection}",
            )
        self.connection = hello.connection
        self.phase = Phase.LIVE
        self.keys, self.key_problems = {}, {}
        self._define_nbytes = 0
        self._replies = Replies()
        return None

    def disconnect(self, connection: int) -> bool:
        """Note that the connection is gone without BYE. Return False if it no longer spoke for the session."""
        if connection != self.connection or self.phase is not Phase.LIVE:
            return False
        self.phase = Phase.ORPHANED
        self._replies = Replies()
        return True

    def end(self) -> None:
        """Take a BYE: the rank left in order."""
        self.phase = Phase.ENDED

    def die(self) -> None:
        """Note that the rank's process is gone without BYE."""
        if self.phase is not Phase.ENDED:
            self.phase = Phase.DIED
            self._replies = Replies()

    @property
    def at_rest(self) -> bool:
        """Whether the rank is gone for good and the outcome of everything that it sent is known."""
        return self.phase in (Phase.ENDED, Phase.DIED) and not self.in_work and not self.held

    # Messages of the rank

    def define(self, message: Define, frame_nbytes: int) -> None:
        """Store a key's definition, whose frame counts towards MAX_DEFINE_NBYTES.

        A key whose records cannot be stored is kept, too. Its records are then refused, and counted under its name.

        Raises:
            ProtocolError: The key id was defined differently before, or MAX_DEFINE_NBYTES is exceeded.
        """
        known = self.keys.get(message.id)
        if known is not None:
            if known != message:
                raise ProtocolError(f"key id {message.id} is defined twice, differently")
            return
        self._define_nbytes += frame_nbytes
        if self._define_nbytes > MAX_DEFINE_NBYTES:
            raise ProtocolError(f"key definitions exceed {MAX_DEFINE_NBYTES} bytes on one connection")
        problem = define_problem(message)
        if problem is not None:
            self.key_problems[message.id] = problem
        self.keys[message.id] = message
        if len(self.quant_types) < MAX_QUANT_TYPES and not is_scalar(message.key):
            self.quant_types.add(message.key.quant_type)

    def put(self, items: Iterable[Checked]) -> list[Submission]:
        """Take a batch and return the captures to submit to the pipeline, in order.

        A known sequence is answered again. A sequence in work is ignored, because its answer will come. A descriptor
        with an error is refused.
        """
        submit: list[Submission] = []
        for item, define, problem in items:
            sequence = item.sequence
            record = sequence if item.part is None else item.part.record
            if sequence in self.in_work:
                continue
            if self._is_answered(record):
                self._ack(sequence)
            elif (reason := self._refused.get(record)) is not None:
                self._nack(sequence, reason, "refused before")
            elif problem is not None or define is None:
                self._turn_away(item, define, DropReason.BAD_DESCRIPTOR, problem or "undefined key")
            elif record in (self._unfinished if item.part is None else self.in_work):
                self._turn_away(
                    item, None, DropReason.BAD_DESCRIPTOR, f"sequence {record} is already in work"
                )
            elif item.part is None or self._is_new_part(item):
                submission = (item, define)
                self.in_work[sequence] = submission
                self.newest_iteration = item.moment.iteration
                self.in_work_nbytes += _held_nbytes(item)
                self.arena_nbytes += item.nbytes
                submit.append(submission)
        return submit

    def _is_answered(self, record: int) -> bool:
        """Return whether the record was acknowledged."""
        return (
            record in self.done or record in self.held or any(record in gone for gone in self.let_go.values())
        )

    def _is_new_part(self, item: Descriptor) -> bool:
        """Return whether the part must be gathered. If not, it is answered."""
        try:
            new = self._unfinished.take(item)
        except PartRefused as refused:
            self._turn_away(item, None, refused.reason, str(refused))
            return False
        if not new:
            self._ack(item.sequence)
        return new

    def _turn_away(self, item: Descriptor, define: Define | None, reason: DropReason, message: str) -> None:
        """Refuse a capture that is not in work, and with a part everything here of its record."""
        self._refuse(item, define, reason, message)
        if self._unfinished.forget(item.record):
            self._abandoned.append(item.record)

    def take_abandoned(self) -> list[int]:
        """Hand over the records that the pipeline must release, after the submissions that `put` returned earlier."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def drops(self, message: Drops) -> None:
        """Take cumulative rows of the rank's drop ledger. Raises ProtocolError if a key is not defined."""
        for row in message.rows:
            define = self.keys.get(row.key_id)
            if define is None:
                raise ProtocolError(f"drop row for key id {row.key_id}, which was never defined")
            self.ledger.report(define, row)

    def flush(self, message: Flush) -> None:
        """Answer when every received sequence ≤ `upto` has its outcome. Raises ProtocolError on too many FLUSHes."""
        self._replies.flush(message, self.in_work)

    # Reports of the pipeline

    def committed(self, sequence: int) -> None:
        """Note that a record is committed, or that a part has arrived that is not the last of its record."""
        item, _ = self.in_work[sequence]
        if item.ends_record:
            self.done.add(item.record)
        self._arrived(sequence, item)

    def hold(self, sequence: int) -> None:
        """Note that the flight recorder has a record. The rank need not wait for its outcome."""
        item, _ = self.in_work[sequence]
        self.held.add(item.record)
        self._arrived(sequence, item)

    def keep(self, record: int) -> None:
        """Note that a held record is committed."""
        self.held.remove(record)
        self.done.add(record)

    def lose(self, reason: DropReason, records: RangeSet) -> None:
        """Note that held records will never be committed."""
        gone = self.let_go.setdefault(reason, RangeSet())
        for first, last in records.ranges():
            gone.add_range(first, last)
        for record in records:
            self.held.remove(record)

    @property
    def let_go_counts(self) -> dict[DropReason, int]:
        """The records that were held and are not committed, by reason."""
        return {reason: len(records) for reason, records in self.let_go.items()}

    def _arrived(self, sequence: int, item: Descriptor) -> None:
        if item.part is not None and (item.ends_record or not item.nbytes):
            self._unfinished.forget(item.record)
        self._ack(sequence)
        self._settle(sequence)

    def refused(self, sequence: int, reason: DropReason, message: str) -> None:
        """Note that a record will never be committed.

        It counts under a reason that only the daemon gives. Otherwise it could be taken for a drop that the rank
        counts itself under the same reason.
        """
        if reason not in DAEMON_REASONS:
            message = f"{reason.value}: {message}"
            reason = DropReason.STORE_ERROR
        item, define = self.in_work[sequence]
        self._refuse(item, define, self._refused.get(item.record, reason), message)
        self._unfinished.forget(item.record)
        self._settle(sequence)

    @property
    def records_in_work(self) -> int:
        """The number of records with captures in work. A record in parts counts once."""
        return len({item.record for item, _ in self.in_work.values()})

    # Replies

    @property
    def has_replies(self) -> bool:
        """Whether replies wait to be sent."""
        return bool(self._replies)

    def take_replies(self) -> list[DaemonMessage]:
        """Hand over all waiting replies."""
        return self._replies.take()

    # Inside

    def _ack(self, sequence: int) -> None:
        # Nobody listens in another phase. A rank that reconnects asks again.
        if self.phase is not Phase.LIVE:
            return
        self._replies.ack(sequence)

    def _nack(self, sequence: int, reason: DropReason, message: str) -> None:
        if self.phase is Phase.LIVE:
            self._replies.nack(sequence, reason, message)

    def _refuse(self, item: Descriptor, define: Define | None, reason: DropReason, message: str) -> None:
        """Refuse a record for good.

        If the last part of a record is not in work, the rank may already know another end of the record. It gave the
        record up, or an earlier daemon refused it. The rank alone then counts this end, or the record counts as
        `rank_died`.
        """
        self._refused[item.record] = reason
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        if item.part is None or (item.ends_record and item.sequence in self.in_work):
            self.refused_counts[reason] = self.refused_counts.get(reason, 0) + 1
            if define is not None:
                self.ledger.refuse(item, define, reason)
        self._nack(item.sequence, reason, message)

    def _settle(self, sequence: int) -> None:
        item, _ = self.in_work.pop(sequence)
        self.in_work_nbytes -= _held_nbytes(item)
        self.arena_nbytes -= item.nbytes
        self._replies.settled(sequence)


def _held_nbytes(item: Descriptor) -> int:
    return RECORD_NBYTES + len(item.metadata) + (0 if item.row_offset is None else ROW_NBYTES)
