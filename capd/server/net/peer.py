"""One accepted socket: who is on the other side, its first byte and descriptor, and frames both ways.

Frames are those of `multiprocessing.connection`, read without it: several that are there come in one call, and nothing
is ever unpickled.
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

__all__ = ["SEND_TIMEOUT_S", "Credentials", "Peer", "PeerGone", "Refusal", "framed"]

SEND_TIMEOUT_S = 5.0  # a peer that takes nothing for so long is disconnected
_SO_PEERPIDFD = 77  # Linux 6.5; valid even where the peer's pid is not (other pid namespace)
_MAX_FDS = 4
_READ_NBYTES = 64 << 10
_HEADER = struct.Struct("!i")  # the length of a frame, as multiprocessing.connection writes it
_UCRED = struct.Struct("iII")


def framed(message: DaemonMessage) -> bytes:
    """A message as it goes over a connection."""
    frame = encode(message)
    return _HEADER.pack(len(frame)) + frame


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
        self._unread = bytearray()  # of frames that are not taken yet
        self._poll: tuple[select.poll, tuple[int, ...]] | None = None
        self._closing = threading.Lock()
        self._closed = False
        self.received_nbytes = 0  # length of the last frame

    def process_handle(self) -> int | None:
        """A descriptor, readable once the process that connected is dead: a pidfd, where it lives; None: unknown.

        A forked child may hold the rank's socket open, so end of file alone does not show a rank's death.
        """
        with contextlib.suppress(OSError):
            return self._sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        if self.credentials.pid > 0:
            try:
                return os.pidfd_open(self.credentials.pid)
            except ProcessLookupError:  # it is gone: a descriptor that is readable, too
                return os.eventfd(1, os.EFD_CLOEXEC)
            except OSError:
                pass
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
        return self._sock.fileno()

    def receive(self) -> ClientMessage:
        """The next message. Raises PeerGone at its end, ProtocolError on anything that is not one."""
        while not self._has_frame():
            try:
                chunk = self._sock.recv(_READ_NBYTES)  # several frames at once, where there are
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
        """Whether a whole frame is unread; `received_nbytes` is its length then. Raises ProtocolError."""
        if len(self._unread) < _HEADER.size:
            return False
        (self.received_nbytes,) = _HEADER.unpack_from(self._unread)
        if not 0 <= self.received_nbytes <= MAX_FRAME_NBYTES:
            raise ProtocolError(f"a frame is longer than {MAX_FRAME_NBYTES} bytes")
        return len(self._unread) >= _HEADER.size + self.received_nbytes

    def send(self, message: DaemonMessage) -> None:
        """Send one message. Raises PeerGone when the peer is away or takes nothing for SEND_TIMEOUT_S."""
        try:
            self._sock.sendall(framed(message))
        except OSError:
            self.shutdown()  # a frame may be half sent: nothing sensible can follow
            raise PeerGone from None

    def send_some(self, frames: memoryview) -> int:
        """Send as much of `frames` as the socket takes at once; returns how much. Raises PeerGone."""
        try:
            return self._sock.send(frames, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            raise PeerGone from None

    def wait(self, *others: int, timeout_s: float | None = None) -> set[int]:
        """Descriptors among this connection and `others` that are readable; empty when the time is over."""
        if self._poll is None or self._poll[1] != others:
            poll = select.poll()
            for fd in (self.fileno(), *others):
                poll.register(fd, select.POLLIN)
            self._poll = poll, others
        here = {self.fileno()} if self._has_frame() else set()
        timeout_ms = 0 if here else None if timeout_s is None else timeout_s * 1000
        return here | {fd for fd, _ in self._poll[0].poll(timeout_ms)}

    def has_sent(self) -> bool:
        """Whether the socket holds something that is not received yet, or the end. From any thread."""
        with self._closing:
            if self._closed:
                return False
            poll = select.poll()
            poll.register(self.fileno(), select.POLLIN)
            return bool(poll.poll(0))

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
                self._sock.close()
