"""What the daemon knows about one rank, across its reconnects: a pure state machine without I/O.

One Session per client uuid. Its shell (`capd.server.rank.rank`) feeds it messages and the pipeline's outcomes
under a lock, hands the submissions it returns to the pipeline, and sends the replies it has collected.

    LIVE ── connection lost ──► ORPHANED ── process gone ──► DIED
     │  ◄──── newer connection of the same uuid ────┘            (a newer connection revives DIED, too)
     └──── BYE ──► ENDED

A sequence is new, in work, committed or refused. New ones are submitted once; a repeated one joins the work, or is
answered again from what is known. Parts of a record are in work until their bytes are here, the last one until the
record is committed; what is committed or refused is the record's own sequence.

The connection ordinal decides which connection speaks for the session: an older or equal one is refused, and what a
superseded connection still sends is ignored.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from capd.server.rank.accounting import DAEMON_REASONS
from capd.server.rank.checks import define_problem
from capd.server.rank.ledger import Ledger
from capd.server.rank.parts import PartRefused, Unfinished
from capd.server.rank.put_batch import Checked
from capd.server.rank.replies import Replies
from capd.store.format.ranges import RangeSet
from capd_client.errors import ProtocolError
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.messages import DaemonMessage, Define, Descriptor, Drops, Flush, Hello, Reject
from capd_client.protocol.statistics_row import ROW_NBYTES

__all__ = ["MAX_DEFINE_NBYTES", "MAX_REFUSED", "RECORD_NBYTES", "Phase", "Session"]

MAX_DEFINE_NBYTES = 64 << 20  # DEF frames kept per connection
# What a capture in work takes at most; its elements, metadata and statistics row left out.
RECORD_NBYTES = 2 << 10
MAX_REFUSED = 65_536  # refusals remembered; a repeated PUT of an older one is tried again

Submission = tuple[Descriptor, Define]


class Phase(enum.Enum):
    """Where a session stands."""

    LIVE = "live"
    ORPHANED = "orphaned"
    ENDED = "ended"
    DIED = "died"


class Session:
    """State of one client uuid. Not thread-safe: the shell holds a lock around every call."""

    def __init__(self, client: bytes, run_id: str, committed: Iterable[tuple[int, int]] = ()) -> None:
        self.client = client
        self.run_id = run_id
        self.phase = Phase.ORPHANED
        self.connection: int | None = None
        self.keys: dict[int, Define] = {}
        self.key_problems: dict[int, str] = {}  # keys whose records cannot be stored, and why
        self.done = RangeSet(committed)
        self.refused_counts: dict[DropReason, int] = {}
        self.in_work: dict[int, Submission] = {}
        self.in_work_nbytes = 0  # of memory that they take here: their elements stay in the arena
        self.ledger = Ledger()
        self._refused: dict[int, DropReason] = {}  # by record
        self._unfinished = Unfinished()
        self._abandoned: list[int] = []  # records of which parts are here and no more will be taken
        self._define_nbytes = 0
        self._replies = Replies()

    # The connection

    def connect(self, hello: Hello) -> Reject | None:
        """Let this connection speak for the session, or say why not. Takes over from an older one."""
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
        """The connection is gone without BYE; False when it did not speak for the session any more."""
        if connection != self.connection or self.phase is not Phase.LIVE:
            return False
        self.phase = Phase.ORPHANED
        self._replies = Replies()
        return True

    def end(self) -> None:
        """BYE: the rank left in order."""
        self.phase = Phase.ENDED

    def die(self) -> None:
        """The rank's process is gone without BYE."""
        if self.phase is not Phase.ENDED:
            self.phase = Phase.DIED
            self._replies = Replies()

    @property
    def at_rest(self) -> bool:
        """The rank is gone for good and the outcome of everything it sent is known."""
        return self.phase in (Phase.ENDED, Phase.DIED) and not self.in_work

    # What the rank sends

    def define(self, message: Define, frame_nbytes: int) -> None:
        """Intern a key. Raises ProtocolError on a changed redefinition or past MAX_DEFINE_NBYTES.

        A key that cannot be stored is kept, too: its records are refused, and counted under its name.
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

    def put(self, items: Iterable[Checked]) -> list[Submission]:
        """Take a batch; returns what must be submitted to the pipeline, in order.

        Known sequences are answered from knowledge, those in work are joined, and descriptors with a
        problem are refused.
        """
        submit: list[Submission] = []
        for item, define, problem in items:
            sequence = item.sequence
            record = sequence if item.part is None else item.part.record
            if sequence in self.in_work:
                continue
            if record in self.done:
                self._ack(sequence)
            elif (reason := self._refused.get(record)) is not None:
                self._nack(sequence, reason, "refused before")
            elif problem is not None or define is None:
                self._turn_away(item, define, DropReason.BAD_DESCRIPTOR, problem or "undefined key")
            elif record in (self._unfinished if item.part is None else self.in_work):
                self._turn_away(
                    item, None, DropReason.BAD_DESCRIPTOR, f"sequence {record} is in work already"
                )
            elif item.part is None or self._is_new_part(item):
                submission = (item, define)
                self.in_work[sequence] = submission
                self.in_work_nbytes += _held_nbytes(item)
                submit.append(submission)
        return submit

    def _is_new_part(self, item: Descriptor) -> bool:
        """Whether the part must be gathered; if not, it is answered."""
        try:
            new = self._unfinished.take(item)
        except PartRefused as refused:
            self._turn_away(item, None, refused.reason, str(refused))
            return False
        if not new:
            self._ack(item.sequence)
        return new

    def _turn_away(self, item: Descriptor, define: Define | None, reason: DropReason, message: str) -> None:
        """Refuse what is not in work, and with a part all that is here of its record."""
        self._refuse(item, define, reason, message)
        if self._unfinished.forget(item.record):
            self._abandoned.append(item.record)

    def take_abandoned(self) -> list[int]:
        """Hand over the records that the pipeline must let go of, behind what `put` returned before."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def drops(self, message: Drops) -> None:
        """Take cumulative rows of the rank's drop ledger. Raises ProtocolError on an undefined key."""
        for row in message.rows:
            define = self.keys.get(row.key_id)
            if define is None:
                raise ProtocolError(f"drop row for key id {row.key_id}, which was never defined")
            self.ledger.report(define, row)

    def flush(self, message: Flush) -> None:
        """Answer once every received sequence ≤ `upto` has its outcome. Raises ProtocolError on too many of them."""
        self._replies.flush(message, self.in_work)

    # What the pipeline reports

    def committed(self, sequence: int) -> None:
        """A record is real; or a part, not the last of its record, is here."""
        item, _ = self.in_work[sequence]
        if item.ends_record:
            self.done.add(item.record)
        if item.part is not None and (item.ends_record or not item.nbytes):
            self._unfinished.forget(item.record)
        self._ack(sequence)
        self._settle(sequence)

    def refused(self, sequence: int, reason: DropReason, message: str) -> None:
        """A record will never be. Counted under a reason only the daemon gives, so that the rank's own
        drops under the same reason are not mistaken for it."""
        if reason not in DAEMON_REASONS:
            message = f"{reason.value}: {message}"
            reason = DropReason.STORE_ERROR
        item, define = self.in_work[sequence]
        self._refuse(item, define, self._refused.get(item.record, reason), message)
        self._unfinished.forget(item.record)
        self._settle(sequence)

    @property
    def records_in_work(self) -> int:
        """Captures that something is in work of, each counted once."""
        return len({item.record for item, _ in self.in_work.values()})

    # Replies

    @property
    def has_replies(self) -> bool:
        """Something waits to be sent."""
        return bool(self._replies)

    def take_replies(self) -> list[DaemonMessage]:
        """Hand over everything that waits."""
        return self._replies.take()

    # Inside

    def _ack(self, sequence: int) -> None:
        if self.phase is not Phase.LIVE:
            return  # nobody listens; a reconnecting rank asks again
        self._replies.ack(sequence)

    def _nack(self, sequence: int, reason: DropReason, message: str) -> None:
        if self.phase is Phase.LIVE:
            self._replies.nack(sequence, reason, message)

    def _refuse(self, item: Descriptor, define: Define | None, reason: DropReason, message: str) -> None:
        """Never to be committed. Of a record whose last part is not in work the rank may know an end of its own, given
        up or refused by an earlier daemon: that one the rank counts alone, or it counts as `rank_died`."""
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
        self._replies.settled(sequence)


def _held_nbytes(item: Descriptor) -> int:
    return RECORD_NBYTES + len(item.metadata) + (0 if item.row_offset is None else ROW_NBYTES)
