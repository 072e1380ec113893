"""The client thread of a rank: keeps a conversation with the daemon for the whole life of the job.

States: DISCONNECTED (tries again after 50 ms … 2 s, without end) → HANDSHAKE (HELLO sent) → RUNNING → DISCONNECTED …
The state is ENDED after BYE or a refusal without retry. The thread never waits for a state. It looks at everything
once per tick. `capd_client.transport.rests` chooses the length of a tick.

Training threads wake the thread only when they begin to wait themselves, or when the arena fills up. More wake-ups
would cost them the GIL. Copies from devices continue independently (`capd_client.device.pump`).
"""

from __future__ import annotations

import contextlib
import enum
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Optional

from capd_client.device.snapshots import DeviceStager
from capd_client.inflight.queue import Queue
from capd_client.process.log import RateLimitedLog
from capd_client.process.wakeup import Wakeup
from capd_client.protocol.counter_page import DROP_REASONS, DropReason
from capd_client.protocol.messages import HANDSHAKE_TIMEOUT_S, ByeOk, NackRow, Reject, Welcome
from capd_client.steps.keeps import Keeps
from capd_client.steps.steering import Steering
from capd_client.transport.conversation import Conversation, FlushRequest, Verdict
from capd_client.transport.growth import Growth
from capd_client.transport.link import IO_TIMEOUT_S, Link
from capd_client.transport.rests import Rests

__all__ = ["State", "Transport"]

_BACKOFF_S = (0.05, 2.0)
# The time for WELCOME, on one connection.
_PATIENCE_S = 60.0


class State(enum.Enum):
    """The states of a session; see the module."""

    DISCONNECTED = "disconnected"
    HANDSHAKE = "handshake"
    RUNNING = "running"
    ENDED = "ended"


class Transport:
    """The client thread with its connection.

    Args:
        connect: Makes the n-th connection of this process (n from 1) within so many seconds, and sends HELLO. Raises
            OSError if it cannot.
        queue: The in-flight queue.
        notices: The log.
        steering: Follows `capd ctl`.
        keeps: What the flight recorder is asked to keep.
        wakeup: Ends a rest of the thread. The queue has the same one.
        renew: Set when a fact in HELLO has changed, so that the session continues on a new connection.
        stagers: The stagers of the devices whose copies go to the arena. The list may grow.
        growth: Grows and shrinks the arena; None: the arena keeps its size.
        ping_s: The silence of the daemon after which it gets a PING.
        name: The name of the thread.
    """

    def __init__(
        self,
        connect: Callable[[int, float], Link],
        queue: Queue,
        notices: RateLimitedLog,
        steering: Steering,
        keeps: Keeps,
        wakeup: Wakeup,
        renew: threading.Event,
        *,
        stagers: Sequence[DeviceStager] = (),
        growth: Optional[Growth] = None,
        ping_s: float = 5.0,
        name: str = "capd-client",
    ) -> None:
        self._connect = connect
        self._queue = queue
        self._notices = notices
        self._steering = steering
        self._keeps = keeps
        self._growth = growth
        self._ping_s = ping_s
        self._talk: Optional[Conversation] = None
        self._random = random.Random()  # noqa: S311 - jitter; private, the job's generators stay untouched
        self._stagers = stagers
        self._flushes: list[FlushRequest] = []
        self._flush_id = 0
        self._connections = 0
        self._backoff_s = _BACKOFF_S[0]
        self._next_attempt = 0.0
        # The end of the handshake's time.
        self._deadline = 0.0
        # Whether the outage was reported. With this variable, `capd run` has reported it.
        self._outage_reported = "CAPD_RUN_NO_DAEMON" in os.environ
        self._leaving = False
        self._renew = renew
        self._stop = threading.Event()
        self._rests = Rests(queue, lambda: any(stager.pending for stager in self._stagers))
        self._wakeup = wakeup
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Set when the daemon has the final counters.
        self.bye_ok = threading.Event()
        # Set while the last attempt to connect has failed or is overdue.
        self.refused = threading.Event()
        # The newest WELCOME; None if the rank was never connected.
        self.welcome: Optional[Welcome] = None
        self.state = State.DISCONNECTED

    # -- called by other threads ------------------------------------------------------------------------

    def start(self) -> None:
        """Connect, if that needs no wait, and start the client thread.

        The daemon then has the arena before the first capture. So it can commit the captures of a job that ends within
        milliseconds.

        Raises:
            RuntimeError: The system allows no further thread.
        """
        # After an error, the thread tries again and reports the problem.
        with contextlib.suppress(OSError):
            self._begin(0.0)
        try:
            self._thread.start()
        except RuntimeError:
            self._drop_link()
            raise

    @property
    def device_busy(self) -> bool:
        """Whether copies from a device may still be writing to the arena."""
        return any(stager.pending or stager.failed for stager in self._stagers)

    def flush(self, upto: int, timeout_s: float) -> bool:
        """Wait until every sequence ≤ `upto` is committed or dropped. Return False if the time is up before."""
        if self._queue.settled(upto) or not self._thread.is_alive():
            return self._queue.settled(upto)
        with self._queue.lock:
            self._flush_id += 1
            request = FlushRequest(self._flush_id, upto)
            self._flushes = [*self._flushes, request]
        self._wakeup.wake()
        request.done.wait(timeout_s)
        with self._queue.lock:
            self._flushes = [other for other in self._flushes if other is not request]
        return self._queue.settled(upto)

    def keep(self, reason: str, iteration: Optional[int]) -> None:
        """Ask the flight recorder to keep the iterations around one. Never waits; any thread, also a signal handler."""
        self._keeps.ask(reason, iteration)
        self._wakeup.wake()

    def leave(self) -> None:
        """Send BYE as soon as nothing is in flight. The answer sets `bye_ok`."""
        self._leaving = True
        self._wakeup.wake()

    def stop(self, timeout_s: float) -> bool:
        """End the thread and close the connection. Return False if the thread did not end in time."""
        self._stop.set()
        self._wakeup.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close_in_child(self) -> None:
        """Close the socket in a forked child. The thread does not exist there."""
        talk, self._talk = self._talk, None
        if talk is not None:
            talk.link.close_in_child()

    # -- the client thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            self._guarded_step()
        self._drop_link()

    def _guarded_step(self) -> None:
        try:
            self._step()
        except (OSError, EOFError) as error:
            self._disconnected(error)
        except Exception as error:
            self._notices.warn("client_thread", "the client thread met %s: %s", type(error).__name__, error)
            self._disconnected(error)

    def _step(self) -> None:
        worked = False
        self._tend_arena()
        if self._flushes or self._leaving or not self._queue.roomy:
            for stager in self._stagers:
                stager.hurry()
        now = time.monotonic()
        talk = self._talk
        if self.state is State.DISCONNECTED and now >= self._next_attempt:
            self._begin(IO_TIMEOUT_S)
        elif self.state is State.HANDSHAKE and now > self._deadline:
            self._overdue(now)
        elif self.state is State.RUNNING and self._renew.is_set():
            self._drop_link()
            self.state = State.DISCONNECTED
        elif self.state is State.RUNNING and talk is not None:
            talk.send_keeps()
            worked = talk.send_ready()
            talk.send_flushes(self._flushes)
            talk.send_drops()
            talk.send_answers()
            talk.keep_alive()
            if self._leaving:
                talk.say_bye()
        self._rest(worked)
        for request in self._flushes:
            if self._queue.settled(request.upto):
                request.done.set()

    def _begin(self, connect_s: float) -> None:
        self._connections += 1
        self._renew.clear()
        self._await_welcome(self._connect(self._connections, connect_s))

    def _await_welcome(self, link: Link) -> None:
        """Continue with a connection on which HELLO was sent."""
        self._talk = Conversation(
            link, self._queue, self._steering, self._keeps, ping_s=self._ping_s, refused=self._nacked
        )
        self._deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        self.state = State.HANDSHAKE

    def _tend_arena(self) -> None:
        """Let the arena grow. If it may be smaller, continue the session with a smaller arena."""
        growth = self._growth
        if growth is None or not growth.look() or self.state is not State.RUNNING:
            return
        if self.device_busy or self._leaving:
            return
        link = growth.shrink(self._connections + 1)
        if link is not None:
            self._connections += 1
            self._drop_link()
            self._await_welcome(link)

    def _rest(self, worked: bool) -> None:
        """Wait for an answer or the next tick, and take the answers."""
        calm = not (self._flushes or self._leaving or self._keeps.waiting) and self.state is State.RUNNING
        easy_s = self._rests.easy_s() if calm else 0.0
        tick_s = self._rests.next_tick_s(worked, easy_s)
        talk = self._talk
        if talk is None:
            self._stop.wait(tick_s)
            return
        if easy_s:
            # All answers that arrive during the rest are taken together.
            self._wakeup.rest(max(tick_s, easy_s), self._called)
        elif not talk.link.wait(tick_s):
            return
        verdict = talk.hear()
        if verdict is not None:
            self._judge(verdict, talk)

    def _called(self) -> bool:
        """Return whether there is a reason to call `wake`."""
        waiting = (
            self._flushes
            or self._leaving
            or self._keeps.waiting
            or self._stop.is_set()
            or self._queue.waiting.count
        )
        return bool(waiting)

    def _judge(self, verdict: Verdict, talk: Conversation) -> None:
        if isinstance(verdict, Welcome):
            if self.welcome is None:
                self._notices.info("captures of run %s go to %s", verdict.run_id, verdict.store)
                self._say_what_it_continues(verdict)
            self._queue.reconnected()
            self.welcome = verdict
            self._backoff_s = _BACKOFF_S[0]
            self._outage_reported = False
            self.refused.clear()
            self.state = State.RUNNING
        elif isinstance(verdict, ByeOk):
            self.state = State.ENDED
            self._drop_link()
            self.bye_ok.set()
        elif verdict.retry or verdict.code == "superseded":
            raise ConnectionError(verdict.message)
        else:
            self._rejected(verdict)

    def _say_what_it_continues(self, welcome: Welcome) -> None:
        if welcome.held_before:
            self._notices.warn(
                "continues",
                "continues run %s, which holds %d records; the new ones are its attempt %d",
                welcome.run_id,
                welcome.held_before,
                welcome.attempt,
            )

    def _rejected(self, verdict: Reject) -> None:
        self.state = State.ENDED
        self._drop_link()
        lost = self._queue.close(DropReason.REJECTED)
        self._notices.warn(
            "rejected",
            "the daemon refused this rank (%s): %s. Nothing is captured any more; %d captures in flight are dropped",
            verdict.code,
            verdict.message,
            lost,
        )

    def _nacked(self, row: NackRow) -> None:
        reason = DROP_REASONS[row.reason].value
        self._notices.warn(f"nack {row.reason}", "the daemon refused a capture: %s: %s", reason, row.message)

    def _disconnected(self, error: BaseException) -> None:
        """Close the connection and try again later. The delay doubles, with jitter to spread the ranks."""
        self._drop_link()
        if self.state is State.ENDED:
            return
        was_running = self.state is State.RUNNING
        self.state = State.DISCONNECTED
        self.refused.set()
        self._next_attempt = time.monotonic() + self._backoff_s * self._random.uniform(0.5, 1.0)
        self._backoff_s = min(self._backoff_s * 2, _BACKOFF_S[1])
        # An EOFError has no text.
        self._report_outage(
            "lost" if was_running else "cannot reach", str(error) or "it closed the connection"
        )

    def _overdue(self, now: float) -> None:
        """Report that HELLO is not answered in time, and continue to wait.

        On a busy node the daemon answers late. A second HELLO would double the work that it has no time for.
        """
        if now > self._deadline + _PATIENCE_S:
            raise TimeoutError("it did not answer HELLO")
        if not self.refused.is_set():
            self.refused.set()
            self._report_outage("cannot reach", "it has not answered HELLO yet")

    def _report_outage(self, what: str, why: str) -> None:
        if not self._outage_reported:
            self._outage_reported = True
            self._notices.warn(
                "disconnected",
                "%s the daemon: %s. Captures wait in the arena and are dropped when it is full; "
                "capd keeps trying to connect",
                what,
                why,
            )

    def _drop_link(self) -> None:
        talk, self._talk = self._talk, None
        if talk is not None:
            talk.link.close()
