"""The conversation of a rank with the daemon on one connection: only the order of messages, no reconnects.

Every connection has a new Conversation. Keys are defined again, and every unacknowledged capture is due again.
Methods raise OSError or EOFError if the connection is lost. Nothing is sent to a peer that does not read. So a stopped
daemon delays nothing, and no frame is left half sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Optional, Union

from capd_client.inflight.queue import Queue
from capd_client.protocol.control import Drain, Drained, KeepReply, Steer, Steered
from capd_client.protocol.messages import (
    MAX_BATCH,
    Ack,
    Bye,
    ByeOk,
    DaemonMessage,
    Drops,
    Flush,
    Flushed,
    Nack,
    NackRow,
    Ping,
    Pong,
    Put,
    Reject,
    Welcome,
)
from capd_client.steps.keeps import Keeps
from capd_client.steps.steering import Steering
from capd_client.transport.link import Link

__all__ = ["Conversation", "FlushRequest", "Verdict"]

_DROPS_INTERVAL_S = 1.0
_MAX_DROP_ROWS = 1024
# PUTs in a row, before the thread looks at answers.
_MAX_PUTS = 16
_MISSED_PINGS = 3

Verdict = Union[Welcome, Reject, ByeOk]


@dataclass(eq=False)
class FlushRequest:
    """A flush that a thread waits for on `done`."""

    id: int
    upto: int
    done: threading.Event = field(default_factory=threading.Event)


class Conversation:
    """The state of one connection.

    Args:
        link: The connection. HELLO was sent.
        queue: The in-flight queue.
        steering: Follows `capd ctl`.
        keeps: What the flight recorder is asked to keep.
        ping_s: The silence of the daemon after which it gets a PING.
        refused: Called with every row of a NACK, for a log line.
        clock: A monotonic clock.
    """

    def __init__(
        self,
        link: Link,
        queue: Queue,
        steering: Steering,
        keeps: Keeps,
        *,
        ping_s: float,
        refused: Callable[[NackRow], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.link = link
        self._queue = queue
        self._steering = steering
        self._keeps = keeps
        # The id of the last KEEP sent on this connection.
        self._last_keep = 0
        self._ping_s = ping_s
        self._refused = refused
        self._clock = clock
        # By key id: 1 if the definition was sent on this connection.
        self._defined = bytearray()
        # The ids of the FLUSHes sent.
        self._flushed: set[int] = set()
        # The DRAINs to answer: the id, and the last sequence before it.
        self._drains: list[tuple[int, int]] = []
        # The last STEERED sent on this connection.
        self._answered: Optional[Steered] = None
        self._bye_sent = False
        self._unanswered = 0
        self._last_drops = float("-inf")
        self._last_heard = self._last_ping = clock()

    def send_ready(self) -> bool:
        """Send the ready captures, oldest first. Return whether there were any."""
        for count in range(_MAX_PUTS):
            if not self._queue.unsent or not self.link.writable():
                return count > 0
            batch = self._queue.next_batch(MAX_BATCH)
            if not batch:
                return count > 0
            for capture in batch:
                self._define(capture.descriptor.key_id)
            self.link.send(Put([capture.descriptor for capture in batch]))
        return True

    def send_flushes(self, requests: list[FlushRequest]) -> None:
        """Send the FLUSHes whose captures are all sent."""
        for request in requests:
            if request.id not in self._flushed and self._queue.all_sent(request.upto):
                self.link.send(Flush(request.id, request.upto))
                self._flushed.add(request.id)

    def send_drops(self, *, at_once: bool = False) -> None:
        """Send the changed rows of the drop ledger, at most once per second."""
        ledger = self._queue.ledger
        now = self._clock()
        if not ledger.changed or (now - self._last_drops < _DROPS_INTERVAL_S and not at_once):
            return
        self._last_drops = now
        while ledger.changed and (at_once or self.link.writable()):
            with self._queue.lock:
                rows = ledger.take(_MAX_DROP_ROWS)
            for row in rows:
                self._define(row.key_id)
            self.link.send(Drops(rows))

    def send_answers(self) -> None:
        """Answer `capd ctl`: send the steering of this rank if it changed, and the finished drains."""
        answer = self._steering.answer
        if answer is not None and answer is not self._answered and self.link.writable():
            self.link.send(answer)
            self._answered = answer
        while self._drains and self._queue.settled(self._drains[0][1]) and self.link.writable():
            self.link.send(Drained(self._drains.pop(0)[0]))

    def send_keeps(self) -> None:
        """Send the keeps that were not sent on this connection."""
        if not self._keeps.waiting:
            return
        for keep in self._keeps.after(self._last_keep):
            if not self.link.writable():
                return
            self.link.send(keep)
            self._last_keep = keep.id

    def say_bye(self) -> None:
        """Send BYE once, when nothing is in flight any more and every keep is answered. The counter page is final then.

        A rank that gave up captures in flight sends no BYE. The daemon takes these captures from the arena of a rank
        that leaves without BYE.
        """
        if self._keeps.waiting:
            return
        if not self._bye_sent and not self._queue.busy and not self._queue.waiting.closed:
            self.send_drops(at_once=True)
            self.link.send(Bye())
            self._bye_sent = True

    def keep_alive(self) -> None:
        """Send PING to a silent daemon. Raises TimeoutError after three unanswered PINGs."""
        now = self._clock()
        if now - max(self._last_ping, self._last_heard) < self._ping_s:
            return
        if self._unanswered >= _MISSED_PINGS:
            raise TimeoutError(f"no answer to {_MISSED_PINGS} pings")
        self._last_ping = now
        self._unanswered += 1
        if self.link.writable():
            self.link.send(Ping())

    def hear(self) -> Optional[Verdict]:
        """Take the answers that have arrived. Return the first that changes the session's state."""
        verdict: Optional[Verdict] = None
        messages = self.link.receive()
        if messages:
            self._last_heard = self._clock()
            self._unanswered = 0
        # All ACKs are settled together. No other message is about a capture of an ACK.
        acked = [each for message in messages if isinstance(message, Ack) for each in message.ranges]
        if acked:
            self._queue.acknowledged(acked)
        for message in messages:
            if isinstance(message, (Welcome, Reject, ByeOk)):
                verdict = verdict or message
            elif not isinstance(message, Ack):
                self._take(message)
        return verdict

    def _take(self, message: DaemonMessage) -> None:
        if isinstance(message, Nack):
            self._queue.refused(message.rows)
            for row in message.rows:
                self._refused(row)
        elif isinstance(message, Steer):
            self._steering.receive(message)
        elif isinstance(message, KeepReply):
            self._keeps.answered(message)
        elif isinstance(message, Drain):
            self._drains.append((message.id, self._queue.last_sequence))
        elif not isinstance(message, (Flushed, Pong)):
            raise ConnectionError(f"the daemon sent a {type(message).__name__} to a rank")

    def _define(self, key_id: int) -> None:
        defined = self._defined
        if key_id >= len(defined):
            defined.extend(bytes(key_id + 64))
        if not defined[key_id]:
            self.link.send(self._queue.definitions[key_id].define)
            defined[key_id] = 1
