"""The replies that wait for one rank: acknowledgements, refusals, and answers to its FLUSHes. Pure.

Nothing is kept for a rank that does not listen; its session starts with no replies. A rank that reconnects repeats its
unanswered PUTs, and is answered then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from capd.store.format.ranges import RangeSet
from capd_client.errors import ProtocolError
from capd_client.protocol.counter_page import DROP_REASONS, DropReason
from capd_client.protocol.messages import Ack, DaemonMessage, Flush, Flushed, Nack, NackRow

__all__ = ["ACK_RANGES", "MAX_FLUSHES", "NACK_ROWS", "NACK_TEXT_CHARS", "Replies"]

# Unanswered FLUSHes of one session.
MAX_FLUSHES = 64
# Ranges in one ACK message.
ACK_RANGES = 4096
# Rows in one NACK message.
NACK_ROWS = 64
NACK_TEXT_CHARS = 1000


@dataclass(slots=True)
class _WaitingFlush:
    id: int
    upto: int
    remaining: int


class Replies:
    """The replies of one session, until its sender takes them. Not thread-safe."""

    def __init__(self) -> None:
        self._acks = RangeSet()
        self._nacks: list[NackRow] = []
        self._flushes: list[_WaitingFlush] = []
        self._answers: list[DaemonMessage] = []

    def __bool__(self) -> bool:
        return bool(self._nacks or self._answers or self._acks)

    def ack(self, sequence: int) -> None:
        """Acknowledge a sequence that is committed, or a part that has arrived."""
        self._acks.add(sequence)

    def nack(self, sequence: int, reason: DropReason, message: str) -> None:
        """Refuse a sequence that will never be committed."""
        self._nacks.append(NackRow(sequence, DROP_REASONS.index(reason), message[:NACK_TEXT_CHARS]))

    def flush(self, message: Flush, in_work: Iterable[int]) -> None:
        """Answer with FLUSHED when the sequences ≤ `upto` among `in_work` are settled.

        Raises:
            ProtocolError: MAX_FLUSHES are already waiting.
        """
        remaining = sum(1 for sequence in in_work if sequence <= message.upto)
        if not remaining:
            self._answers.append(Flushed(message.id))
            return
        if len(self._flushes) >= MAX_FLUSHES:
            raise ProtocolError(f"more than {MAX_FLUSHES} unanswered FLUSHes")
        self._flushes.append(_WaitingFlush(message.id, message.upto, remaining))

    def settled(self, sequence: int) -> None:
        """Note that a sequence is no longer in work. Its own reply is already here."""
        if not self._flushes:
            return
        for flush in self._flushes:
            flush.remaining -= sequence <= flush.upto
        self._answers += [Flushed(flush.id) for flush in self._flushes if flush.remaining <= 0]
        self._flushes = [flush for flush in self._flushes if flush.remaining > 0]

    def take(self) -> list[DaemonMessage]:
        """Hand over all waiting replies: ACKs and NACKs first, so that FLUSHED comes after them."""
        ranges = self._acks.ranges()
        replies: list[DaemonMessage] = [
            Ack(ranges[at : at + ACK_RANGES]) for at in range(0, len(ranges), ACK_RANGES)
        ]
        replies += [Nack(self._nacks[at : at + NACK_ROWS]) for at in range(0, len(self._nacks), NACK_ROWS)]
        replies += self._answers
        self._acks, self._nacks, self._answers = RangeSet(), [], []
        return replies
