"""Sends one connection's messages from a thread of its own, so that nobody ever waits for a slow peer.

Replies collect in the session; a wake-up is followed by a pause of at most COALESCE_S, in which further
acknowledgements join the same message. A peer that takes nothing for `peer.SEND_TIMEOUT_S` is disconnected.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from capd.errors import ProtocolError
from capd.server.peer import SEND_TIMEOUT_S, Peer, PeerGone
from capd_client.protocol import DaemonMessage

__all__ = ["COALESCE_S", "MAX_POSTED", "Sender"]

COALESCE_S = 0.002
MAX_POSTED = 1024  # answers waiting for a peer that asks without reading


class Sender:
    """The sending side of one connection."""

    def __init__(self, peer: Peer, name: str, take: Callable[[], list[DaemonMessage]]) -> None:
        """`take` hands over the replies that have collected; it is called from the sender's thread."""
        self._peer = peer
        self._take = take
        self._posted: deque[DaemonMessage] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Replies wait to be taken. Never blocks; called from the pipeline's threads."""
        if not self._wake.is_set():
            self._wake.set()

    def post(self, message: DaemonMessage) -> None:
        """Send `message` behind the replies that wait now. Raises ProtocolError past MAX_POSTED."""
        if len(self._posted) >= MAX_POSTED:
            raise ProtocolError(f"{MAX_POSTED} answers wait because the peer does not read")
        self._posted.append(message)
        self.wake()

    def disconnect(self) -> None:
        """End the connection at once; its reader notices and closes."""
        self._peer.shutdown()

    def close(self, last: DaemonMessage | None = None) -> None:
        """Send what waits, then `last`, and end the thread; waits at most a little over SEND_TIMEOUT_S."""
        if last is not None:
            self._posted.append(last)
        self._closing.set()
        self._wake.set()
        self._thread.join(SEND_TIMEOUT_S + 1)
        if self._thread.is_alive():  # it sits in a send that trickles: end the connection under it
            self._peer.shutdown()
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait()
                self._closing.wait(COALESCE_S)
                self._wake.clear()
                last_round = self._closing.is_set()  # whoever closes from here on wakes this thread again
                self._send_all()
                if last_round:
                    return
        except PeerGone:
            return

    def _send_all(self) -> None:
        posted = len(self._posted)  # before the replies are taken: a posted answer comes after them
        for message in self._take():
            self._peer.send(message)
        for _ in range(posted):
            self._peer.send(self._posted.popleft())
