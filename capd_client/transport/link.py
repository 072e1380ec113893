"""One connection to the daemon: connects, hands over the arena, then carries framed messages in both directions.

No call waits longer than IO_TIMEOUT_S. Only a send to a peer that stopped in the middle of a frame waits at all.
After any OSError or EOFError the connection is unusable, because a frame may be half sent. Its owner closes it.
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
from capd_client.transport.peer import check_peer

__all__ = ["IO_TIMEOUT_S", "Link"]

IO_TIMEOUT_S = 2
_READ_NBYTES = 64 << 10
# The length of a frame, as multiprocessing.connection writes it.
_HEADER = struct.Struct("!i")


class Link:
    """A connected socket. The first call is `greet`.

    Args:
        path: The daemon's socket.
        connect_s: The time to connect. 0 does not wait, even if the daemon's queue of connections is full.

    Raises:
        OSError: There is no daemon, it does not accept the connection in time, or it may be another user's.
    """

    def __init__(self, path: str, *, connect_s: float = IO_TIMEOUT_S) -> None:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.settimeout(connect_s)
            try:
                peer.connect(path)
            except OSError as error:
                raise type(error)(error.errno, f"{path}: {error.strerror or error}") from None
            check_peer(peer, path)
            peer.setblocking(True)
            limit = struct.pack("ll", IO_TIMEOUT_S, 0)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        except BaseException:
            peer.close()
            raise
        self._socket = peer
        # The first bytes of a frame.
        self._unread = b""
        self._readable = select.poll()
        self._readable.register(peer, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(peer, select.POLLOUT)

    def greet(self, arena_fd: int, hello: Hello) -> None:
        """Hand over the arena and send HELLO. The socket's buffer takes both at once. An error closes the socket.

        A daemon that has hung up already is no error. It may have refused, and its answer can still be received.
        """
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._socket, [ARENA_BYTE], [arena_fd])
                self.send(hello)
        except BaseException:
            self.close()
            raise

    def send(self, message: ClientMessage) -> None:
        """Send one message. Raises OSError if the peer is gone or has not read for IO_TIMEOUT_S."""
        frame = encode(message)
        self._socket.sendall(_HEADER.pack(len(frame)) + frame)

    def writable(self) -> bool:
        """Return whether most of the socket's buffer is empty, so that a batch fits. Also True for a broken socket."""
        return bool(self._writable.poll(0))

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`. Return whether a message or the end has arrived."""
        return bool(self._readable.poll(timeout_s * 1000))

    def receive(self) -> list[DaemonMessage]:
        """Return the messages that have arrived, with one call into the kernel. Each call costs the GIL.

        Raises:
            EOFError: The connection is at its end.
            OSError: The peer sent something that is no message of a daemon.
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
        """Close the inherited descriptor in a forked child. The parent's stream stays as it is."""
        with contextlib.suppress(OSError):
            # Not by its number, which may belong to another file when the socket object is collected.
            self._socket.close()


def _decoded(frame: bytes) -> DaemonMessage:
    try:
        return decode_daemon(frame)
    except msgspec.DecodeError as error:
        raise ConnectionError(f"it sent something outside the protocol: {error}") from None
