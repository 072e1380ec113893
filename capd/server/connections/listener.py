"""The listener: accepts connections and gives each peer its own thread.

A silent, slow or hostile peer therefore delays only itself.
The uid of each peer is checked. Its first byte tells rank from tool. Its first message must arrive within
HANDSHAKE_TIMEOUT_S of the accept, however slowly its bytes come. Each refusal is answered with REJECT and counted by
code. It is logged at most every few seconds per code.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from functools import partial

from capd.errors import ProtocolError
from capd.server.connections.rank import ConnectionContext, serve_rank
from capd.server.connections.tool import ToolContext, serve_tool
from capd.server.net.peer import Peer, PeerGone, Refusal
from capd.server.net.users import AllowedUsers
from capd.server.priority import PromptThread, yield_to_training
from capd_client.protocol.messages import HANDSHAKE_TIMEOUT_S, Reject

__all__ = ["Listener"]

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 5.0
_EXPIRY_CHECK_S = 0.25
_JOIN_S = 0.1


class Listener:
    """The accept loop and the connections that it started."""

    def __init__(
        self,
        sock: socket.socket,
        ranks: ConnectionContext,
        tools: ToolContext,
        *,
        allowed: AllowedUsers,
        max_connections: int,
    ) -> None:
        self._sock = sock
        self._ranks, self._tools = ranks, tools
        self._allowed = allowed
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._open: dict[Peer, threading.Thread] = {}
        # Peers that have sent no message yet → the time until which they may wait.
        self._greeting: dict[Peer, float] = {}
        self._late: set[Peer] = set()
        # Peers of which it is not known yet whether they are a tool or an admitted rank.
        self._arriving: set[Peer] = set()
        # Tools that wait for the end of the daemon. The end does not wait for them.
        self._awaiting_end: set[Peer] = set()
        self._logged_at: dict[str, float] = {}
        # The number of connections sent away, by code.
        self.refused: dict[str, int] = {}
        self._accepting: PromptThread | None = None

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._open)

    @property
    def arriving(self) -> int:
        """The number of open connections that are neither known to be a tool nor an admitted rank."""
        return len(self._arriving)

    def start(self, accepting: PromptThread) -> None:
        """Begin to accept in the thread `accepting`. Connections have its priority until they are admitted."""
        self._accepting = accepting
        accepting.begin(self._accept_loop)

    def join_accept(self) -> None:
        """Wait until nothing is accepted any more. The closing descriptor must be set before."""
        if self._accepting is not None:
            self._accepting.join()

    def stop(self, timeout_s: float) -> None:
        """Wait for all connections to end by themselves. After `timeout_s` the rest are disconnected."""
        until = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._open.items())
            for peer in self._greeting:
                peer.shutdown()
        left = []
        for peer, thread in threads:
            while thread.is_alive() and peer not in self._awaiting_end and time.monotonic() < until:
                # A tool may begin to wait for the end in the meantime.
                thread.join(min(_JOIN_S, max(0.0, until - time.monotonic())))
            if thread.is_alive() and peer not in self._awaiting_end:
                left.append((peer, thread))
                peer.shutdown()
        for _, thread in left:
            thread.join(1.0)

    def _accept_loop(self) -> None:
        closing = self._tools.closing
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(closing, select.POLLIN)
        self._sock.setblocking(False)
        while True:
            ready = {fd for fd, _ in poll.poll(_EXPIRY_CHECK_S * 1000 if self._greeting else None)}
            self._expire()
            if closing in ready:
                # A rank that connected in time may be gone by now, but its arena is in the socket's queue.
                while self._accept():
                    pass
                return
            if ready:
                self._accept()

    def _accept(self) -> bool:
        """Take the next connection. Return False if there is none, or if no resources are left for it."""
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return False
        except ConnectionAbortedError:
            return True
        except OSError as error:
            # No descriptors or no memory are left. The open connections go on.
            self._count("resources", f"cannot accept a connection: {error}")
            select.select([self._tools.closing], [], [], 0.1)
            return False
        sock.setblocking(True)
        try:
            peer = Peer(sock)
        except OSError:
            sock.close()
            return True
        thread = threading.Thread(target=self._serve, args=(peer,), name="capd-connection", daemon=True)
        with self._lock:
            self._open[peer] = thread
            self._arriving.add(peer)
            self._greeting[peer] = time.monotonic() + HANDSHAKE_TIMEOUT_S
        try:
            thread.start()
        except RuntimeError as error:
            # The system allows no further thread.
            self._count("resources", f"cannot start a thread: {error}")
            self._forget(peer)
        return True

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            # A peer whose bytes wait unread is not late: the delay is this daemon's.
            late = [peer for peer, until in self._greeting.items() if until < now and not peer.has_sent()]
            for peer in late:
                del self._greeting[peer]
                self._late.add(peer)
                peer.shutdown(socket.SHUT_RD)

    # A connection's own thread

    def _serve(self, peer: Peer) -> None:
        try:
            self._admit(peer)
            fd = peer.receive_first()
            greeted = partial(self._greeted, peer)
            if fd is None:
                yield_to_training()
                self._placed(peer)
                serve_tool(self._tools, peer, greeted, partial(self._awaits_end, peer))
            else:
                serve_rank(self._ranks, peer, fd, greeted, partial(self._placed, peer))
        except PeerGone:
            if peer in self._late:
                self._send_away(
                    peer, Reject("malformed", f"no HELLO within {HANDSHAKE_TIMEOUT_S:g} s", retry=True)
                )
        except Refusal as refusal:
            self._send_away(peer, refusal.reject)
        except ProtocolError as error:
            self._send_away(peer, Reject("malformed", str(error)))
        except OSError as error:
            # No descriptors or no memory are left; the rank may try again later.
            self._send_away(peer, Reject("peer", f"the daemon cannot serve now: {error}", retry=True))
        except Exception:
            # This is the outermost loop of the thread: an error of one connection must not end the daemon.
            logger.exception("a connection failed")
            self._count("internal", "a connection failed")
        finally:
            self._forget(peer)

    def _admit(self, peer: Peer) -> None:
        refusal = self._allowed.refusal(peer.uid, peer.pid)
        if refusal is not None:
            raise Refusal("peer", refusal)
        if len(self._open) > self._max_connections:
            raise Refusal(
                "peer", f"{self._max_connections} connections are open, no more are taken", retry=True
            )

    def _greeted(self, peer: Peer) -> None:
        with self._lock:
            self._greeting.pop(peer, None)

    def _awaits_end(self, peer: Peer) -> None:
        with self._lock:
            self._awaiting_end.add(peer)

    def _placed(self, peer: Peer) -> None:
        with self._lock:
            self._arriving.discard(peer)

    def _send_away(self, peer: Peer, reject: Reject) -> None:
        self._count(reject.code, f"sent away pid {peer.pid} ({reject.code}): {reject.message}")
        with contextlib.suppress(PeerGone):
            peer.send(reject)

    def _count(self, code: str, text: str) -> None:
        now = time.monotonic()
        with self._lock:
            self.refused[code] = self.refused.get(code, 0) + 1
            quiet = now - self._logged_at.get(code, -_LOG_INTERVAL_S) < _LOG_INTERVAL_S
            if not quiet:
                self._logged_at[code] = now
        if not quiet:
            logger.warning("%s", text)

    def _forget(self, peer: Peer) -> None:
        with self._lock:
            self._open.pop(peer, None)
            self._greeting.pop(peer, None)
            self._late.discard(peer)
            self._arriving.discard(peer)
            self._awaiting_end.discard(peer)
        peer.close()
