"""Frames from a peer: as many as are there at once, whatever their bytes come in; and what a late peer has sent."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from capd.errors import ProtocolError
from capd.server.connections.listener import Listener
from capd.server.net.peer import Peer, PeerGone, framed
from capd.server.net.users import AllowedUsers
from capd_client.protocol.messages import Bye, ClientMessage, Flush, Ping

Ends = tuple[socket.socket, Peer]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    peer = Peer(theirs)
    yield ours, peer
    ours.close()
    peer.close()


def frame(message: ClientMessage) -> bytes:
    return framed(cast("Any", message))  # both directions have the same frames


def test_frames_that_came_together_are_received_one_by_one_and_count_as_readable(ends: Ends) -> None:
    ours, peer = ends
    last = frame(Bye())
    ours.sendall(frame(Ping()) + frame(Flush(1, 2)) + last[:-1])
    assert peer.receive() == Ping()
    assert peer.wait(timeout_s=0) == {peer.fileno()}  # though the socket is empty
    assert peer.receive() == Flush(1, 2)
    assert peer.wait(timeout_s=0) == set()
    ours.sendall(last[-1:])
    assert peer.receive() == Bye()


def test_a_peer_that_closes_within_a_frame_is_gone_after_the_whole_ones(ends: Ends) -> None:
    ours, peer = ends
    ours.sendall(frame(Ping()) + frame(Bye())[:-1])
    ours.close()
    assert peer.receive() == Ping()
    with pytest.raises(PeerGone):
        peer.receive()


@pytest.mark.parametrize("length", [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"])
def test_a_frame_of_impossible_length_is_refused_before_it_is_read(ends: Ends, length: bytes) -> None:
    ours, peer = ends
    ours.sendall(length)
    with pytest.raises(ProtocolError, match="longer than"):
        peer.receive()


def test_a_peer_whose_hello_nobody_had_time_to_read_is_not_late() -> None:
    listener = Listener(
        cast("Any", None),
        cast("Any", None),
        cast("Any", SimpleNamespace(closing=0)),
        allowed=AllowedUsers(os.getuid(), ()),
        max_connections=8,
    )
    silent, spoken = socket.socketpair(), socket.socketpair()
    peers = [Peer(pair[1]) for pair in (silent, spoken)]
    spoken[0].sendall(b"A")
    listener._greeting = dict.fromkeys(peers, 0.0)  # the time of both is over
    listener._expire()
    assert listener._late == {peers[0]}
    assert list(listener._greeting) == [peers[1]]
    for pair in (silent, spoken):
        pair[0].close()
    for peer in peers:
        peer.close()
