"""The thread that sends to all connections. It never waits for one peer, so a slow peer delays only itself.

Replies collect in the sessions. After a wake-up the thread pauses for at most COALESCE_S, so that acknowledgements of
other ranks join the same round. A peer that takes nothing for SEND_TIMEOUT_S is disconnected.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from capd.errors import ProtocolError
from capd.server.net.peer import SEND_TIMEOUT_S, Peer, PeerGone, framed
from capd_client.protocol.messages import DaemonMessage

__all__ = ["COALESCE_S", "MAX_POSTED", "SendLoop", "Sender"]

logger = logging.getLogger(__name__)

COALESCE_S = 0.002
# Answers that may wait for a peer that asks without reading.
MAX_POSTED = 1024


class SendLoop:
    """The sending thread, and the connections that have something to send. A daemon has one."""

    def __init__(self) -> None:
        # The senders that called since the last round. Single operations use it without a lock.
        self._called: dict[Sender, None] = {}
        self._woken = False
        self._stopping = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Senders whose sockets are full → the time at which their peers are given up.
        self._full: dict[Sender, float] = {}
        self._thread = threading.Thread(target=self._run, name="capd-send", daemon=True)
        self._thread.start()

    def call(self, sender: Sender) -> None:
        """Note that `sender` has something to send. Never blocks."""
        self._called[sender] = None
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """End the thread. All senders are closed by then, and nobody calls any more."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        os.close(self._wake_fd)

    def _run(self) -> None:
        while not self._stopping:
            self._wait()
            # This comes first, so that a call from now on wakes this thread again.
            self._woken = False
            due = dict.fromkeys(self._full)
            while self._called:
                due[self._called.popitem()[0]] = None
            for sender in due:
                self._serve(sender)

    def _wait(self) -> None:
        """Wait for a call and then pause for others to join; or wait until a full socket takes more."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        for sender in self._full:
            poll.register(sender.peer.fileno(), select.POLLOUT)
        timeout_s = None if not self._full else max(0.0, min(self._full.values()) - time.monotonic())
        ready = poll.poll(None if timeout_s is None else timeout_s * 1000)
        if any(fd == self._wake_fd for fd, _ in ready):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            time.sleep(COALESCE_S)

    def _serve(self, sender: Sender) -> None:
        try:
            before = sender.unsent
            done = sender.send()
            if done:
                self._full.pop(sender, None)
            elif sender not in self._full or sender.unsent != before:
                self._full[sender] = time.monotonic() + SEND_TIMEOUT_S
            elif self._full[sender] < time.monotonic():
                raise PeerGone
        except PeerGone:
            self._drop(sender)
        except Exception:
            # This is the outermost loop of the thread: an error of one connection must not end the others.
            logger.exception("nothing more can be sent to a connection")
            self._drop(sender)

    def _drop(self, sender: Sender) -> None:
        self._full.pop(sender, None)
        sender.give_up()


class Sender:
    """The sending side of one connection."""

    def __init__(self, peer: Peer, loop: SendLoop, take: Callable[[], list[DaemonMessage]]) -> None:
        """Bind a connection to the loop, whose thread calls `take` for the collected replies."""
        self.peer = peer
        self._loop = loop
        self._take = take
        self._posted: deque[DaemonMessage] = deque()
        self._unsent = memoryview(b"")
        self._closing = False
        # Set when the loop no longer touches this connection.
        self._over = threading.Event()

    @property
    def unsent(self) -> int:
        """The number of bytes that the socket has not taken."""
        return len(self._unsent)

    def wake(self) -> None:
        """Note that replies wait. Never blocks; the threads of the pipeline call it."""
        self._loop.call(self)

    def post(self, message: DaemonMessage) -> None:
        """Send `message` after the replies that wait now. Raises ProtocolError if MAX_POSTED answers already wait."""
        if len(self._posted) >= MAX_POSTED:
            raise ProtocolError(f"{MAX_POSTED} answers wait because the peer does not read")
        self._posted.append(message)
        self.wake()

    def disconnect(self) -> None:
        """End the connection at once; its reader notices and closes it."""
        self.peer.shutdown()

    def close(self, last: DaemonMessage | None = None) -> None:
        """Send everything that waits, then `last`. Takes at most a little more than SEND_TIMEOUT_S."""
        if last is not None:
            self._posted.append(last)
        self._closing = True
        self.wake()
        if not self._over.wait(SEND_TIMEOUT_S + 1):
            # The peer takes a few bytes at a time and never comes to an end.
            self.disconnect()
            self._over.wait()

    # The loop's thread

    def send(self) -> bool:
        """Send as much as the socket takes at once. Return whether it took everything. Raises PeerGone."""
        if self._over.is_set():
            return True
        # A later `close` calls the loop again.
        closing = self._closing
        if not self._unsent:
            self._unsent = memoryview(self._gather())
        while self._unsent:
            sent = self.peer.send_some(self._unsent)
            if not sent:
                return False
            self._unsent = self._unsent[sent:]
            if not self._unsent:
                self._unsent = memoryview(self._gather())
        if closing:
            self._over.set()
        return True

    def _gather(self) -> bytes:
        """Return the frames of all messages that wait."""
        # Counted before the replies are taken, because a posted answer comes after them.
        posted = len(self._posted)
        messages = self._take()
        messages += [self._posted.popleft() for _ in range(posted)]
        return b"".join(framed(message) for message in messages)

    def give_up(self) -> None:
        """Disconnect a peer that is gone or takes nothing. The reader notices."""
        self.peer.shutdown()
        self._over.set()
