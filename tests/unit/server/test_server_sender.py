"""The sender of one connection: nothing that is handed to it stays behind."""

from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Connection

from capd.server import sender as sending
from capd.server.peer import Peer
from capd.server.sender import Sender
from capd_client.protocol import Reject, decode_daemon


def test_a_close_between_two_steps_of_the_thread_still_ends_it_and_sends_the_last_word() -> None:
    ours, theirs = socket.socketpair()
    peer, frames = Peer(theirs), Connection(ours.detach())
    reached, closed = threading.Event(), threading.Event()

    class Wake(threading.Event):
        def clear(self) -> None:  # the thread is held here until somebody has closed
            reached.set()
            assert closed.wait(10)
            super().clear()

    sender = Sender(peer, "sender", list)
    wake, first = Wake(), sender._wake
    sender._wake = wake
    for event in (first, wake):  # it waits on the event it was born with or, if it is late, on the other one
        event.set()
    assert reached.wait(10)

    sender._posted.append(Reject("malformed", "the last word"))
    sender._closing.set()
    wake.set()
    closed.set()

    sender._thread.join(sending.SEND_TIMEOUT_S)
    assert not sender._thread.is_alive()
    assert frames.poll(10)
    assert decode_daemon(frames.recv_bytes()) == Reject("malformed", "the last word")
    frames.close()
    peer.close()
