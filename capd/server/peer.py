"""One accepted socket: who is on the other side, its first byte and descriptor, and frames both ways.

Frames are read and written with `multiprocessing.connection.Connection.recv_bytes` and `send_bytes` only:
its `recv` would unpickle, and so run, what a peer sends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec

from capd.errors import ProtocolError
from capd_client.protocol import (
    ARENA_BYTE,
    MAX_FRAME_NBYTES,
    TOOL_BYTE,
    ClientMessage,
    DaemonMessage,
    Reject,
    decode_client,
    encode,
)

__all__ = ["SEND_TIMEOUT_S", "Credentials", "Peer", "PeerGone", "Refusal"]

SEND_TIMEOUT_S = 5.0  # a peer that takes nothing for so long is disconnected
_SO_PEERPIDFD = 77  # Linux 6.5; valid even where the peer's pid is not (other pid namespace)
_MAX_FDS = 4
_UCRED = struct.Struct("iII")


class PeerGone(Exception):
    """The other side closed the connection, or it was shut down here."""


class Refusal(Exception):
    """A peer is sent away; `reject` says why."""

    def __init__(self, code: str, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.reject = Reject(code, message, retry)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who connected, as the kernel says; pid is 0 for a process in another pid namespace."""

    pid: int
    uid: int


class Peer:
    """Frames to and from one peer. One thread reads, one sends; `shutdown` may come from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over an accepted socket."""
        self._sock = sock
        pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        self.credentials = Credentials(pid, uid)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_TIMEOUT_S), 0))
        self._frames = Connection(sock.fileno())
        self._closing = threading.Lock()
        self._closed = False
        self.received_nbytes = 0  # length of the last frame

    def process_handle(self) -> int | None:
        """A pidfd of the process that connected, readable once it is dead; None where there is none.

        A forked child may hold the rank's socket open, so end of file alone does not show a rank's death.
        """
        with contextlib.suppress(OSError):
            return self._sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        if self.credentials.pid > 0:
            with contextlib.suppress(OSError):
                return os.pidfd_open(self.credentials.pid)
        return None

    def receive_first(self) -> int | None:
        """The arena's descriptor that a rank's first byte brings; None from a tool.

        Raises ProtocolError when the byte is unknown or the number of descriptors is wrong (all are closed
        then), PeerGone when the peer closed before sending anything, OSError where there is no room for a descriptor.
        """
        try:
            first, fds, flags, _ = socket.recv_fds(self._sock, 1, _MAX_FDS)
        except OSError:
            raise PeerGone from None
        wanted = {ARENA_BYTE: 1, TOOL_BYTE: 0}.get(first)
        truncated = bool(flags & socket.MSG_CTRUNC)
        if wanted == len(fds) and not truncated:
            return fds[0] if fds else None
        for fd in fds:
            os.close(fd)
        if not first:
            raise PeerGone
        if truncated and len(fds) < _MAX_FDS:  # the kernel had more to give than this process may have
            raise OSError(errno.EMFILE, "no descriptor is free for the arena")
        if wanted is None:
            raise ProtocolError(f"a connection begins with {ARENA_BYTE!r} or {TOOL_BYTE!r}, not {first!r}")
        count = f"more than {_MAX_FDS}" if truncated else str(len(fds))
        raise ProtocolError(f"{first!r} comes with {wanted} descriptors, {count} were passed")

    def fileno(self) -> int:
        """For poll; only while the connection is open."""
        return self._frames.fileno()

    def receive(self) -> ClientMessage:
        """The next message. Raises PeerGone at its end, ProtocolError on anything that is not one."""
        try:
            frame = self._frames.recv_bytes(MAX_FRAME_NBYTES)
        except EOFError:
            raise PeerGone from None
        except OSError as error:
            if str(error) == "bad message length":  # Connection's own words
                raise ProtocolError(f"a frame is longer than {MAX_FRAME_NBYTES} bytes") from None
            raise PeerGone from None
        self.received_nbytes = len(frame)
        try:
            return decode_client(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"a frame holds no message of the protocol: {error}") from None

    def send(self, message: DaemonMessage) -> None:
        """Send one message. Raises PeerGone when the peer is away or takes nothing for SEND_TIMEOUT_S."""
        try:
            self._frames.send_bytes(encode(message))
        except OSError:
            self.shutdown()  # a frame may be half sent: nothing sensible can follow
            raise PeerGone from None

    def wait(self, *others: int, timeout_s: float | None = None) -> set[int]:
        """Descriptors among this connection and `others` that are readable; empty when the time is over."""
        poll = select.poll()
        for fd in (self.fileno(), *others):
            poll.register(fd, select.POLLIN)
        return {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """Wake the reader (SHUT_RD) or both sides with the end of the connection."""
        with self._closing, contextlib.suppress(OSError):
            if not self._closed:
                self._sock.shutdown(how)

    def close(self) -> None:
        """Close the connection; called by its reader, once nobody sends any more."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._sock.detach()
                self._frames.close()
