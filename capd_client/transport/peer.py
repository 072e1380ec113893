"""The process at the other end of a socket: whether a rank may hand its tensors to it."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct

__all__ = ["check_peer"]

_UCRED = struct.Struct("3i")


def check_peer(peer: socket.socket, path: str) -> None:
    """Check that another user could not have taken the daemon's place.

    A daemon of this user or of root is trusted. One of another user is trusted if its socket lies where not everybody
    can make a directory: in /tmp, any user can wait for ranks under the name that somebody else uses.

    Args:
        peer: The connected socket.
        path: The path that it was connected to.

    Raises:
        PermissionError: The daemon is not trusted. The message says what to do.
    """
    _, uid, _ = _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid in (os.geteuid(), 0):
        return
    place = os.path.dirname(os.path.realpath(path))
    while True:
        if os.stat(place).st_mode & stat.S_IWOTH:
            raise PermissionError(
                errno.EPERM,
                f"{path}: it runs as uid {uid}, and any user can make a socket below {place}; a daemon for several "
                "users needs its socket elsewhere, such as in /run/capd",
            )
        if place == os.path.dirname(place):
            return
        place = os.path.dirname(place)
