"""An accepted socket: who is on the other side, its first byte and descriptor, and frames both ways.

The frames are those of `multiprocessing.connection`, but its code is not used. One call can read several frames, and
nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading

import msgspec

from capd.errors import ProtocolError
from capd_client.protocol.messages import (
    ARENA_BYTE,
    MAX_FRAME_NBYTES,
    TOOL_BYTE,
    ClientMessage,
    DaemonMessage,
    Reject,
    decode_client,
    encode,
)

__all__ = ["SEND_TIMEOUT_S", "Peer", "PeerGone", "Refusal", "framed"]

# A peer that takes nothing for this time is disconnected.
SEND_TIMEOUT_S = 5.0
# Linux 6.5. It is valid even if the peer's pid is not, as in another pid namespace.
_SO_PEERPIDFD = 77
_MAX_FDS = 4
_READ_NBYTES = 64 << 10
# The length of a frame, as multiprocessing.connection writes it.
_HEADER = struct.Struct("!i")
_UCRED = struct.Struct("iII")


def framed(message: DaemonMessage) -> bytes:
    """Return a message as it goes over a connection: its length, then its encoding."""
    frame = encode(message)
    return _HEADER.pack(len(frame)) + frame


class PeerGone(Exception):
    """The other side closed the connection, or this side shut it down."""


class Refusal(Exception):
    """A peer is sent away; `reject` holds the code and the reason."""

    def __init__(self, code: str, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.reject = Reject(code, message, retry)


class Peer:
    """The connection to one peer. One thread reads and one sends; any thread may call `shutdown`."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over an accepted socket."""
        self._sock = sock
        # The process that connected, as the kernel reports it. The pid is 0 in another pid namespace.
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        self.pid, self.uid, _ = _UCRED.unpack(credentials)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_TIMEOUT_S), 0))
        # Bytes of frames that are not taken yet.
        self._unread = bytearray()
        self._poll: tuple[select.poll, tuple[int, ...]] | None = None
        self._closing = threading.Lock()
        self._closed = False
        # The length of the last frame.
        self.received_nbytes = 0

    def process_handle(self) -> int | None:
        """Return a descriptor that becomes readable when the process that connected is dead; None if there is none.

        A forked child may hold the rank's socket open. End of file alone therefore does not show a rank's death.

        Returns:
            A pidfd that the caller owns. For a process that is already gone it may be an eventfd that is readable at
                once.
        """
        with contextlib.suppress(OSError):
            return self._sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        if self.pid > 0:
            try:
                return os.pidfd_open(self.pid)
            except ProcessLookupError:
                # The process is gone. An eventfd that is already set is readable, as its pidfd would be.
                return os.eventfd(1, os.EFD_CLOEXEC)
            except OSError:
                pass
        return None

    def receive_first(self) -> int | None:
        """Read the first byte; return the arena's descriptor that it brings from a rank, None from a tool.

        Raises:
            ProtocolError: The byte is unknown or the number of descriptors is wrong. All of them are closed.
            PeerGone: The peer closed the connection before it sent anything.
            OSError: This process has no room for a descriptor.
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
        # The kernel had more descriptors to deliver than this process may open.
        if truncated and len(fds) < _MAX_FDS:
            raise OSError(errno.EMFILE, "no descriptor is free for the arena")
        if wanted is None:
            raise ProtocolError(f"a connection begins with {ARENA_BYTE!r} or {TOOL_BYTE!r}, not {first!r}")
        count = f"more than {_MAX_FDS}" if truncated else str(len(fds))
        raise ProtocolError(f"{first!r} comes with {wanted} descriptors, {count} were passed")

    def fileno(self) -> int:
        """Return the descriptor for poll. Call it only while the connection is open."""
        return self._sock.fileno()

    def receive(self) -> ClientMessage:
        """Return the next message. Raises PeerGone at the end, ProtocolError if a frame is not a message."""
        while not self._has_frame():
            try:
                # One call may return several frames.
                chunk = self._sock.recv(_READ_NBYTES)
            except OSError:
                raise PeerGone from None
            if not chunk:
                raise PeerGone
            self._unread += chunk
        frame = bytes(self._unread[_HEADER.size : _HEADER.size + self.received_nbytes])
        del self._unread[: _HEADER.size + self.received_nbytes]
        try:
            return decode_client(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"a frame holds no message of the protocol: {error}") from None

    def _has_frame(self) -> bool:
        """Return whether a whole frame is unread; `received_nbytes` is then its length. Raises ProtocolError."""
        if len(self._unread) < _HEADER.size:
            return False
        (self.received_nbytes,) = _HEADER.unpack_from(self._unread)
        if not 0 <= self.received_nbytes <= MAX_FRAME_NBYTES:
            raise ProtocolError(f"a frame is longer than {MAX_FRAME_NBYTES} bytes")
        return len(self._unread) >= _HEADER.size + self.received_nbytes

    def send(self, message: DaemonMessage) -> None:
        """Send one message. Raises PeerGone if the peer is gone or takes nothing for SEND_TIMEOUT_S."""
        try:
            self._sock.sendall(framed(message))
        except OSError:
            # A frame may be half sent, so no other frame can follow.
            self.shutdown()
            raise PeerGone from None

    def send_some(self, frames: memoryview) -> int:
        """Send as many bytes of `frames` as the socket takes at once, and return their number. Raises PeerGone."""
        try:
            return self._sock.send(frames, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            raise PeerGone from None

    def wait(self, *others: int, timeout_s: float | None = None) -> set[int]:
        """Return the readable descriptors among this connection and `others`; an empty set after `timeout_s`.

        A frame that is already read from the socket counts as readable. Without `timeout_s` the call waits as long as
        needed.
        """
        if self._poll is None or self._poll[1] != others:
            poll = select.poll()
            for fd in (self.fileno(), *others):
                poll.register(fd, select.POLLIN)
            self._poll = poll, others
        here = {self.fileno()} if self._has_frame() else set()
        timeout_ms = 0 if here else None if timeout_s is None else timeout_s * 1000
        return here | {fd for fd, _ in self._poll[0].poll(timeout_ms)}

    def has_sent(self) -> bool:
        """Return whether the socket holds unread bytes or the end of the connection. Any thread may call it."""
        with self._closing:
            if self._closed:
                return False
            poll = select.poll()
            poll.register(self.fileno(), select.POLLIN)
            return bool(poll.poll(0))

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """Signal the end of the connection to the reader (SHUT_RD), or to both sides."""
        with self._closing, contextlib.suppress(OSError):
            if not self._closed:
                self._sock.shutdown(how)

    def close(self) -> None:
        """Close the connection. The reader calls it when nobody sends any more."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._sock.close()
