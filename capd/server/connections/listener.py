"""Accepts connections and gives each a thread; a silent, slow or hostile peer costs only its own.

Per connection: the peer's uid is checked, its first byte tells rank from tool, and its first message must
arrive within HANDSHAKE_TIMEOUT_S of the accept, however slowly it trickles. Refusals are answered with
REJECT, counted by code, and logged at most every few seconds per code.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from capd.errors import ProtocolError
from capd.server.connections.rank import ConnectionContext, serve_rank
from capd.server.connections.tool import ToolContext, serve_tool
from capd.server.net.peer import Peer, PeerGone, Refusal
from capd.server.priority import PromptThread, yield_to_training
from capd_client.protocol.messages import HANDSHAKE_TIMEOUT_S, Reject

__all__ = ["Listener"]

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 5.0
_EXPIRY_CHECK_S = 0.25


class Listener:
    """The accept loop and the connections it started."""

    def __init__(
        self,
        sock: socket.socket,
        ranks: ConnectionContext,
        tools: ToolContext,
        *,
        allowed_uids: frozenset[int],
        max_connections: int,
    ) -> None:
        self._sock = sock
        self._ranks, self._tools = ranks, tools
        self._allowed_uids = allowed_uids
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._open: dict[Peer, threading.Thread] = {}
        self._greeting: dict[Peer, float] = {}  # peers that have not spoken yet → until when they may wait
        self._late: set[Peer] = set()
        self._arriving: set[Peer] = set()  # neither a rank that has its place, nor a tool, yet
        self._logged_at: dict[str, float] = {}
        self.refused: dict[str, int] = {}  # connections sent away, by code
        self._accepting: PromptThread | None = None

    @property
    def connections(self) -> int:
        """Connections open now."""
        return len(self._open)

    @property
    def arriving(self) -> int:
        """Connections open now of which it is not known yet which rank they bring, or that they bring none."""
        return len(self._arriving)

    def start(self, accepting: PromptThread) -> None:
        """Begin to accept, in a thread whose priority the connections have until they are taken."""
        self._accepting = accepting
        accepting.begin(self._accept_loop)

    def join_accept(self) -> None:
        """Wait until nothing is accepted any more, after the closing descriptor was set."""
        if self._accepting is not None:
            self._accepting.join()

    def stop(self, timeout_s: float) -> None:
        """Wait for all connections to end by themselves; whoever is left after `timeout_s` is disconnected."""
        until = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._open.items())
            for peer in self._greeting:
                peer.shutdown()
        left = []
        for peer, thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
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
                while (
                    self._accept()
                ):  # who came in time may be gone since, and its arena is in the socket's queue
                    pass
                return
            if ready:
                self._accept()

    def _accept(self) -> bool:
        """Take the next connection; False where there is none, or no room for it."""
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return False
        except ConnectionAbortedError:
            return True
        except OSError as error:  # no descriptors or no memory left: those who are connected go on
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
        except RuntimeError as error:  # no further thread is allowed
            self._count("resources", f"cannot start a thread: {error}")
            self._forget(peer)
        return True

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            # What a peer has sent and nobody could read yet is this daemon's delay, not the peer's.
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
            greeted = self._greeted(peer)
            if fd is None:
                yield_to_training()
                self._placed(peer)
                serve_tool(self._tools, peer, greeted)
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
        except OSError as error:  # no descriptors or no memory left, which may pass
            self._send_away(peer, Reject("peer", f"the daemon cannot serve now: {error}", retry=True))
        except Exception:  # outermost loop of the thread: one connection must not end the daemon
            logger.exception("a connection failed")
            self._count("internal", "a connection failed")
        finally:
            self._forget(peer)

    def _admit(self, peer: Peer) -> None:
        uid = peer.credentials.uid
        if uid not in self._allowed_uids:
            allowed = ", ".join(str(allowed) for allowed in sorted(self._allowed_uids))
            raise Refusal(
                "peer",
                f"uid {uid} may not connect to this daemon, which allows uid {allowed}; "
                f"start it as uid {uid} or with --allow-uid {uid}",
            )
        if len(self._open) > self._max_connections:
            raise Refusal(
                "peer", f"{self._max_connections} connections are open, no more are taken", retry=True
            )

    def _greeted(self, peer: Peer) -> Callable[[], None]:
        def greeted() -> None:
            with self._lock:
                self._greeting.pop(peer, None)

        return greeted

    def _placed(self, peer: Peer) -> None:
        with self._lock:
            self._arriving.discard(peer)

    def _send_away(self, peer: Peer, reject: Reject) -> None:
        self._count(reject.code, f"sent away pid {peer.credentials.pid} ({reject.code}): {reject.message}")
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
        peer.close()
