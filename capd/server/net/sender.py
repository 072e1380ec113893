"""Sends to all connections from one thread, which waits for none of them: a slow peer costs only itself.

Replies collect in the sessions; a wake-up is followed by a pause of at most COALESCE_S, in which further
acknowledgements, of whatever rank, join the same round. A peer that takes nothing for SEND_TIMEOUT_S is disconnected.
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
MAX_POSTED = 1024  # answers waiting for a peer that asks without reading


class SendLoop:
    """The thread, and who has something to send. One for all connections of a daemon."""

    def __init__(self) -> None:
        self._called: dict[
            Sender, None
        ] = {}  # since the last round; used without a lock, by single operations
        self._woken = False
        self._stopping = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._full: dict[
            Sender, float
        ] = {}  # whose sockets take nothing more → until when they are waited for
        self._thread = threading.Thread(target=self._run, name="capd-send", daemon=True)
        self._thread.start()

    def call(self, sender: Sender) -> None:
        """`sender` has something to send. Never blocks."""
        self._called[sender] = None
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """End the thread; all senders are closed, nobody calls any more."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        os.close(self._wake_fd)

    def _run(self) -> None:
        while not self._stopping:
            self._wait()
            self._woken = False  # first: whoever comes from here on wakes this thread again
            due = dict.fromkeys(self._full)
            while self._called:
                due[self._called.popitem()[0]] = None
            for sender in due:
                self._serve(sender)

    def _wait(self) -> None:
        """Until somebody has something to send, and a pause for others to join; or a full socket takes more."""
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
        except Exception:  # outermost loop of the thread: one connection must not end the others
            logger.exception("nothing more can be sent to a connection")
            self._drop(sender)

    def _drop(self, sender: Sender) -> None:
        self._full.pop(sender, None)
        sender.give_up()


class Sender:
    """The sending side of one connection."""

    def __init__(self, peer: Peer, loop: SendLoop, take: Callable[[], list[DaemonMessage]]) -> None:
        """`take` hands over the replies that have collected; it is called from the loop's thread."""
        self.peer = peer
        self._loop = loop
        self._take = take
        self._posted: deque[DaemonMessage] = deque()
        self._unsent = memoryview(b"")
        self._closing = False
        self._over = threading.Event()  # the loop does not touch this connection any more

    @property
    def unsent(self) -> int:
        """Bytes that the socket did not take."""
        return len(self._unsent)

    def wake(self) -> None:
        """Replies wait to be taken. Never blocks; called from the pipeline's threads."""
        self._loop.call(self)

    def post(self, message: DaemonMessage) -> None:
        """Send `message` behind the replies that wait now. Raises ProtocolError past MAX_POSTED."""
        if len(self._posted) >= MAX_POSTED:
            raise ProtocolError(f"{MAX_POSTED} answers wait because the peer does not read")
        self._posted.append(message)
        self.wake()

    def disconnect(self) -> None:
        """End the connection at once; its reader notices and closes."""
        self.peer.shutdown()

    def close(self, last: DaemonMessage | None = None) -> None:
        """Send what waits, then `last`; waits at most a little over SEND_TIMEOUT_S."""
        if last is not None:
            self._posted.append(last)
        self._closing = True
        self.wake()
        if not self._over.wait(SEND_TIMEOUT_S + 1):  # the peer takes a little at a time
            self.disconnect()
            self._over.wait()

    # The loop's thread

    def send(self) -> bool:
        """Send what there is, as far as the socket takes it at once; whether it took all. Raises PeerGone."""
        if self._over.is_set():
            return True
        closing = self._closing  # whoever closes from here on calls the loop again
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
        """The frames of everything that waits."""
        posted = len(self._posted)  # before the replies are taken: a posted answer comes after them
        messages = self._take()
        messages += [self._posted.popleft() for _ in range(posted)]
        return b"".join(framed(message) for message in messages)

    def give_up(self) -> None:
        """The peer is gone, or takes nothing: the reader notices."""
        self.peer.shutdown()
        self._over.set()
