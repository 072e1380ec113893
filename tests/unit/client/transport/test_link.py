"""A rank's connection on a real socket."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest

from capd_client.protocol.messages import Hello, Reject, encode
from capd_client.transport.link import Link


def test_a_daemon_that_refuses_before_hello_is_heard(tmp_path: Path) -> None:
    """It looks at who connects first, and may have hung up before the rank has said anything."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        link = Link(path)
        peer, _ = listener.accept()
        frame = encode(Reject("peer", "uid 7 may not connect"))
        peer.sendall(struct.pack("!i", len(frame)) + frame)
        peer.close()
    fd = os.memfd_create("arena")
    try:
        link.greet(fd, Hello(protocol=2, client=bytes(16), connection=1, rank=0, arena_nbytes=8192))
        assert link.receive() == [Reject("peer", "uid 7 may not connect")]
        with pytest.raises(EOFError):
            link.receive()
    finally:
        link.close()
        os.close(fd)
