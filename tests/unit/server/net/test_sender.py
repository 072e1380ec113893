"""The thread that sends: nothing that is handed to it stays behind, and nobody waits for a peer that does not read."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from capd.server.net import sender as sending
from capd.server.net.peer import Peer
from capd.server.net.sender import Sender, SendLoop
from capd_client.protocol.messages import Ack, DaemonMessage, Pong, Reject, decode_daemon

MUCH = 100_000  # ranges of one ACK, more than a socket takes


@pytest.fixture
def loop() -> Iterator[SendLoop]:
    made = SendLoop()
    yield made
    made.stop()


class Line:
    """A connection: the rank's end, and the sender of the daemon's."""

    def __init__(self, loop: SendLoop) -> None:
        ours, theirs = socket.socketpair()
        self.peer, self.rank = Peer(theirs), Connection(ours.detach())
        self.replies: list[DaemonMessage] = []
        self.sender = Sender(self.peer, loop, self._take)

    def _take(self) -> list[DaemonMessage]:
        taken, self.replies = self.replies, []
        return taken

    def hear(self) -> DaemonMessage:
        assert self.rank.poll(20)
        return decode_daemon(self.rank.recv_bytes())

    def end(self) -> None:
        self.rank.close()
        self.sender.close()
        self.peer.close()


def test_what_waits_is_sent_then_what_was_posted_then_the_last_word(loop: SendLoop) -> None:
    line = Line(loop)
    last = Reject("malformed", "the last word")
    line.replies = [Ack([(1, 2)])]
    line.sender.post(Pong())
    line.sender.close(last)  # returns once all is sent
    assert [line.hear() for _ in range(3)] == [Ack([(1, 2)]), Pong(), last]
    line.end()


def test_a_peer_that_does_not_read_holds_up_nobody_and_gets_the_rest_when_it_reads(loop: SendLoop) -> None:
    deaf, other = Line(loop), Line(loop)
    much = Ack([(2 * at, 2 * at) for at in range(MUCH)])
    deaf.replies = [much]
    deaf.sender.wake()
    for _ in range(3):
        other.sender.post(Pong())
        assert other.hear() == Pong()
    assert deaf.hear() == much
    deaf.end()
    other.end()


def test_a_peer_that_takes_nothing_in_time_is_disconnected(
    loop: SendLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "SEND_TIMEOUT_S", 0.05)
    line = Line(loop)
    line.replies = [Ack([(2 * at, 2 * at) for at in range(MUCH)])]
    line.sender.wake()
    assert line.peer.wait(timeout_s=20) == {line.peer.fileno()}  # its reader finds the end
    line.end()


def test_a_session_that_fails_ends_its_own_connection_alone(
    loop: SendLoop, caplog: pytest.LogCaptureFixture
) -> None:
    broken, other = Line(loop), Line(loop)
    broken.sender._take = lambda: [][0]
    broken.sender.wake()
    assert broken.peer.wait(timeout_s=20) == {broken.peer.fileno()}
    assert "nothing more can be sent" in caplog.text
    other.sender.post(Pong())
    assert other.hear() == Pong()
    broken.end()
    other.end()


def test_many_connections_have_one_thread(loop: SendLoop) -> None:
    before = threading.active_count()
    lines = [Line(loop) for _ in range(64)]
    for line in lines:
        line.sender.post(Pong())
    assert [line.hear() for line in lines] == [Pong()] * 64
    assert threading.active_count() == before
    for line in lines:
        line.end()
