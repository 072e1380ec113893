"""One connection to the daemon: connect, hand over the arena, then framed messages in both directions.

Nothing here waits longer than IO_TIMEOUT_S, and that only to send to a peer that stopped in the middle of a frame.
After any OSError or EOFError the connection is unusable (a frame may be half sent) and is closed by its owner.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct

import msgspec

from capd_client.protocol.messages import (
    ARENA_BYTE,
    MAX_FRAME_NBYTES,
    ClientMessage,
    DaemonMessage,
    Hello,
    decode_daemon,
    encode,
)

__all__ = ["IO_TIMEOUT_S", "Link"]

IO_TIMEOUT_S = 2
_READ_NBYTES = 64 << 10
_HEADER = struct.Struct("!i")  # the length of a frame, as multiprocessing.connection writes it


class Link:
    """A connected socket; first of all `greet` is called.

    Raises OSError from the constructor when there is no daemon, or it does not take the connection in time. connect_s:
    how long that is; 0 does not wait at all, also where others fill the daemon's queue of connections.
    """

    def __init__(self, path: str, *, connect_s: float = IO_TIMEOUT_S) -> None:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.settimeout(connect_s)
            try:
                peer.connect(path)
            except OSError as error:
                raise type(error)(error.errno, f"{path}: {error.strerror or error}") from None
            peer.setblocking(True)
            limit = struct.pack("ll", IO_TIMEOUT_S, 0)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        except BaseException:
            peer.close()
            raise
        self._socket = peer
        self._unread = b""  # the begin of a frame
        self._readable = select.poll()
        self._readable.register(peer, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(peer, select.POLLOUT)

    def greet(self, arena_fd: int, hello: Hello) -> None:
        """Hand over the arena and say HELLO: the socket's buffer takes both at once. Closes the socket on an error.

        A daemon that has hung up already is none: it may have refused, and its answer is there to be received.
        """
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._socket, [ARENA_BYTE], [arena_fd])
                self.send(hello)
        except BaseException:
            self.close()
            raise

    def send(self, message: ClientMessage) -> None:
        """Send one message; raises OSError when the peer is gone or has not read for IO_TIMEOUT_S."""
        frame = encode(message)
        self._socket.sendall(_HEADER.pack(len(frame)) + frame)

    def writable(self) -> bool:
        """Whether the socket has room for a batch: most of its buffer is empty. True as well once it is broken."""
        return bool(self._writable.poll(0))

    def wait(self, timeout_s: float) -> bool:
        """Whether a message (or the end) is there, after waiting up to `timeout_s`."""
        return bool(self._readable.poll(timeout_s * 1000))

    def receive(self) -> list[DaemonMessage]:
        """The messages that are there, taken at once: each further call into the kernel would cost the GIL again.

        Raises EOFError at the end, OSError for anything that is no message of a daemon.
        """
        try:
            chunk = self._socket.recv(_READ_NBYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not chunk:
            raise EOFError
        unread, at = self._unread + chunk, 0
        messages = []
        while len(unread) - at >= _HEADER.size:
            (nbytes,) = _HEADER.unpack_from(unread, at)
            if not 0 <= nbytes <= MAX_FRAME_NBYTES:
                raise ConnectionError(f"it sent something outside the protocol: a frame of {nbytes} bytes")
            begin = at + _HEADER.size
            if begin + nbytes > len(unread):
                break
            at = begin + nbytes
            messages.append(_decoded(unread[begin:at]))
        self._unread = unread[at:]
        return messages

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()

    def close_in_child(self) -> None:
        """After fork, in the child: close the inherited descriptor, which leaves the parent's stream alone."""
        with contextlib.suppress(OSError):
            self._socket.close()  # not by its number: that may be another's when the socket is collected


def _decoded(frame: bytes) -> DaemonMessage:
    try:
        return decode_daemon(frame)
    except msgspec.DecodeError as error:
        raise ConnectionError(f"it sent something outside the protocol: {error}") from None
