"""The client thread against a daemon that stops, vanishes, refuses, lies or keeps silent."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable

import pytest
import torch

from capd_client.inflight.counters import REASON_INDEX
from capd_client.protocol.control import StatsReply
from capd_client.protocol.counter_page import COUNTER_MAGIC, DropReason
from capd_client.protocol.key import Key
from capd_client.protocol.messages import MAX_BATCH, PROTOCOL_VERSION, Ack, Hello, Reject, encode
from capd_client.session.session import Session
from capd_client.transport.client_thread import State
from capd_client.transport.link import Link
from tests.kit.client.peer import Peer, wait_until

KEY = Key(quant_type="q", rank=0, tensor_name="x")


def offer(session: Session, *values: float, size: int = 16, key: Key = KEY) -> None:
    for value in values:
        session.offer(torch.full((size,), float(value)), key, session.context.moment())


def values(peer: Peer) -> list[float]:
    return [torch.frombuffer(bytearray(data), dtype=torch.float32)[0].item() for data in peer.data_of("x")]


def test_the_handshake_says_who_this_is_and_seals_are_set(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session(run_id="r1")
    wait_until(lambda: session.transport.welcome)
    hello = peer.hellos[0]
    assert (hello.client, hello.connection, hello.run_id, hello.pid) == (
        session.client.bytes,
        1,
        "r1",
        os.getpid(),
    )
    assert hello.arena_nbytes == session.arena.nbytes
    assert peer.seals[0] & 0x7 == 0x7


def test_a_run_that_the_daemon_named_is_asked_for_again_when_the_daemon_restarts(
    socket_path: str, make_session: Callable[..., Session]
) -> None:
    first = Peer(socket_path)
    session = make_session()
    wait_until(lambda: session.transport.welcome)
    assert session.transport.welcome is not None
    assert first.hellos[0].run_id is None
    named = session.transport.welcome.run_id
    first.close()

    second = Peer(socket_path)
    try:
        wait_until(lambda: second.hellos)
        assert named
        assert second.hellos[0].run_id == named
    finally:
        second.close()


def test_many_captures_go_in_batches_and_a_key_is_explained_once(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session(arena_bytes=8 << 20)
    peer.hold.set()
    offer(session, *range(1000))
    peer.hold.clear()
    assert session.flush(10)
    assert values(peer) == list(range(1000))
    assert [sequence for _, sequence in peer.puts] == list(range(1, 1001))
    assert len(session.queue.definitions) == 1
    assert MAX_BATCH == 64


def test_a_daemon_that_comes_late_gets_everything(
    socket_path: str, make_session: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    session = make_session()
    offer(session, 1, 2, 3)
    wait_until(lambda: session.transport.refused.is_set())
    peer = Peer(socket_path)
    try:
        wait_until(lambda: session.transport.welcome)
        assert session.flush(10)
        assert values(peer) == [1, 2, 3]
        assert sum("cannot reach" in record.getMessage() for record in caplog.records) == 1
    finally:
        peer.close()


def test_after_a_restart_the_unacknowledged_is_sent_again_in_order_and_nothing_else(
    socket_path: str, make_session: Callable[..., Session]
) -> None:
    first = Peer(socket_path)
    session = make_session()
    offer(session, 1, 2)
    assert session.flush(10)
    first.ack = False
    offer(session, 3, 4, 5)
    wait_until(lambda: len(first.puts) == 5)
    first.close()
    offer(session, 6)

    second = Peer(socket_path)
    try:
        assert session.flush(10)
        assert [sequence for _, sequence in second.puts] == [3, 4, 5, 6]
        assert values(second) == [3, 4, 5, 6]
        assert second.hellos[-1].connection > first.hellos[-1].connection
        assert second.hellos[-1].client == first.hellos[-1].client
        now = session.snapshot()
        assert (now.offered, now.committed, now.in_flight, now.dropped) == (6, 6, 0, {})
    finally:
        second.close()


def test_a_daemon_that_vanishes_is_told_of_with_what_happened(
    socket_path: str, make_session: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    peer = Peer(socket_path)
    session = make_session()
    wait_until(lambda: session.transport.state is State.RUNNING)
    peer.close()

    wait_until(lambda: caplog.records)
    assert "lost the daemon: it closed the connection. Captures wait" in caplog.text


def test_an_acknowledgement_before_the_second_sending_is_taken(
    socket_path: str, make_session: Callable[..., Session]
) -> None:
    first = Peer(socket_path, ack=False)
    session = make_session()
    offer(session, 1, 2)
    wait_until(lambda: len(first.puts) == 2)
    first.close()
    second = Peer(socket_path, ack=False)
    try:
        wait_until(lambda: second.hellos and session.transport.state is State.RUNNING)
        second.send(Ack([(1, 2), (100, 200)]))
        wait_until(lambda: session.snapshot().committed == 2)
    finally:
        second.close()


def test_a_daemon_that_answers_hello_late_is_waited_for_on_the_same_connection(
    peer: Peer, make_session: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    peer.welcome = False
    session = make_session()
    wait_until(lambda: peer.hellos)
    session.transport._deadline = time.monotonic()
    wait_until(lambda: session.transport.refused.is_set())  # close() and flush() need not wait for it
    wait_until(lambda: "has not answered HELLO yet" in caplog.text)  # said behind it
    assert sum("has not answered HELLO yet" in record.getMessage() for record in caplog.records) == 1
    peer.answer_hello()
    wait_until(lambda: session.transport.state is State.RUNNING)
    offer(session, 1)
    assert session.flush(20)
    assert [hello.connection for hello in peer.hellos] == [1]
    assert not session.transport.refused.is_set()


def test_a_silent_daemon_is_left_and_tried_again(
    peer: Peer, make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capd_client.transport.client_thread._PATIENCE_S", 0.0)
    monkeypatch.setattr("capd_client.transport.client_thread.HANDSHAKE_TIMEOUT_S", 0.5)
    peer.welcome = False
    session = make_session()
    session.transport._deadline = 0.5
    wait_until(lambda: session.transport.refused.is_set())
    peer.welcome = True
    offer(session, 1)
    wait_until(lambda: session.transport.welcome)
    assert session.flush(20)
    assert peer.hellos[-1].connection >= 2


def test_a_daemon_that_answers_no_ping_is_left_and_taken_over(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    peer.pong = False
    peer.ack = False
    session = make_session(ping_s=0.1)
    offer(session, 1)
    wait_until(lambda: len(peer.puts) >= 2)
    peer.ack = True  # on the next connection: this one may be closed at any moment
    assert session.flush(20)
    assert peer.puts[0] == (1, 1)
    assert peer.puts[-1][0] >= 2
    assert values(peer) == [1]


def test_a_daemon_that_answers_pings_is_kept(peer: Peer, make_session: Callable[..., Session]) -> None:
    make_session(ping_s=0.5)  # four times that without an answer would end it, however busy the machine
    wait_until(lambda: peer.pings >= 5)
    assert len(peer.hellos) == 1


def test_a_stopped_daemon_costs_drops_and_no_time_and_goes_on_where_it_was(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session(ping_s=60.0)
    wait_until(lambda: session.transport.welcome)
    peer.hold.set()
    wait_until(peer.holding.is_set)  # else it may read, and acknowledge, one message more
    worst = 0.0
    for value in range(3000):
        started = time.perf_counter()
        offer(session, value, size=1024)
        worst = max(worst, time.perf_counter() - started)
    now = session.snapshot()
    assert now.dropped["arena_full"] > 2000
    assert now.offered == now.in_flight + sum(now.dropped.values())
    assert worst < 1.0, "no capture waits for a daemon that does not read"
    assert not session.flush(0.05)

    peer.hold.clear()
    assert session.flush(10)
    kept = now.in_flight
    assert values(peer) == list(range(kept))
    assert len(peer.hellos) == 1


def test_the_ledger_of_drops_reaches_the_daemon(peer: Peer, make_session: Callable[..., Session]) -> None:
    session = make_session()
    session.context.set_moment(iteration=4)
    session.offer(torch.ones(3, dtype=torch.complex64), KEY, session.context.moment())
    session.context.set_moment(iteration=9)
    session.offer(torch.ones(3, dtype=torch.complex64), KEY, session.context.moment())
    assert session.close(10)
    row = peer.drops[KEY, "complex64", REASON_INDEX[DropReason.UNSUPPORTED]]
    assert (row.count, row.first_iteration, row.last_iteration) == (2, 4, 9)


def test_a_refused_session_ends_and_everything_is_counted(
    peer: Peer, make_session: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    peer.reject = Reject("peer", "uid 7 may not", retry=False)
    peer.hold.set()  # until there is something in flight
    session = make_session()
    offer(session, 1, 2)
    peer.hold.clear()
    wait_until(lambda: "2 captures in flight are dropped" in caplog.text)
    offer(session, 3)
    now = session.snapshot()
    assert (now.offered, now.in_flight, now.dropped) == (3, 0, {"rejected": 3})
    assert "uid 7 may not" in caplog.text
    assert len(peer.hellos) == 1
    assert session.flush(5)


def test_what_is_offered_amid_a_refusal_is_counted_once(
    peer: Peer, make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the session has ended already, and the queue are not closed yet."""
    peer.reject = Reject("peer", "uid 7 may not", retry=False)
    peer.hold.set()
    session = make_session()
    offer(session, 1)
    close = session.queue.close

    def offer_and_close(reason: DropReason) -> int:
        if session.transport.state is State.ENDED:
            offer(session, 2)
        return close(reason)

    monkeypatch.setattr(session.queue, "close", offer_and_close)
    peer.hold.clear()
    wait_until(lambda: session.snapshot().dropped)
    now = session.snapshot()
    assert (now.offered, now.in_flight, now.dropped) == (2, 0, {"rejected": 2})


@pytest.mark.parametrize(
    "reject", [Reject("closing", "going down", retry=True), Reject("superseded", "", False)]
)
def test_a_refusal_that_passes_is_tried_again(
    reject: Reject, peer: Peer, make_session: Callable[..., Session]
) -> None:
    peer.reject = reject
    session = make_session()
    offer(session, 1)
    wait_until(lambda: len(peer.hellos) >= 2)
    peer.reject = None
    wait_until(lambda: session.transport.welcome)
    assert session.flush(10)
    assert session.snapshot().committed == 1


def test_refused_captures_are_counted_under_the_daemons_reason(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    peer.nack = REASON_INDEX[DropReason.DISK_FULL]
    session = make_session()
    offer(session, *range(300), size=1000)  # several times the arena
    assert session.flush(10)
    now = session.snapshot()
    assert now.dropped["disk_full"] > 0
    assert (now.committed, now.in_flight) == (0, 0)
    assert sum(now.dropped.values()) == 300


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"not msgpack", b"x" * (2 << 20)])
def test_garbage_from_the_daemon_costs_one_connection(
    frame: bytes, peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session()
    wait_until(lambda: session.transport.welcome)
    peer.send_raw(frame)
    wait_until(lambda: len(peer.hellos) >= 2)
    offer(session, 1)
    assert session.flush(10)
    assert session.snapshot().committed == 1


def test_messages_that_come_in_pieces_or_together_are_taken_whole(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    peer.ack = False
    session = make_session()
    offer(session, *range(5))
    wait_until(lambda: len(peer.puts) == 5)
    frames = [encode(Ack([(sequence, sequence)])) for _, sequence in peer.puts]
    stream = b"".join(struct.pack("!i", len(frame)) + frame for frame in frames)
    cuts = (0, 2, 7, len(stream) // 2, len(stream) - 1, len(stream))
    for begin, end in itertools.pairwise(cuts):
        peer.send_piece(stream[begin:end])
        time.sleep(0.05)  # so that each is read by itself
    wait_until(lambda: session.snapshot().committed == 5)
    assert len(peer.hellos) == 1


def test_a_message_for_tools_costs_one_connection(peer: Peer, make_session: Callable[..., Session]) -> None:
    session = make_session()
    wait_until(lambda: session.transport.welcome)
    peer.send(StatsReply({}))
    wait_until(lambda: len(peer.hellos) >= 2)


def test_block_keeps_everything_and_drop_does_not(peer: Peer, make_session: Callable[..., Session]) -> None:
    session = make_session(policy="block", max_block_ms=20_000.0)
    offer(session, *range(1000), size=4096)  # 16 times the arena
    assert session.flush(20)
    assert session.snapshot().dropped == {}
    assert values(peer) == list(range(1000))


def test_who_waits_for_room_ends_the_rest_of_the_client_thread(
    peer: Peer, make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(policy="block", max_block_ms=20_000.0)
    wait_until(lambda: session.transport.state is State.RUNNING)
    monkeypatch.setattr("capd_client.transport.rests.IDLE_TICK_S", 30.0)
    wait_until(lambda: session.transport._wakeup.dozing)
    offer(session, *range(70), size=4096)  # more than the arena
    assert session.snapshot().dropped == {}


def test_the_client_thread_does_not_rest_long_while_more_waits_than_a_message_takes(
    peer: Peer, make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session()
    easy_s = session.transport._rests.easy_s
    wait_until(lambda: session.transport.state is State.RUNNING)
    assert easy_s() == pytest.approx(0.05)
    monkeypatch.setattr(session.queue, "next_batch", lambda limit: [])
    offer(session, *range(MAX_BATCH), size=1)
    assert easy_s() == pytest.approx(0.05)
    offer(session, 1, size=1)
    assert easy_s() == pytest.approx(0.005)
    monkeypatch.undo()
    assert session.flush(10)


def test_a_rest_is_long_while_little_is_taken_and_shorter_the_fuller_the_arena(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session()
    wait_until(lambda: session.transport.state is State.RUNNING)
    peer.ack = False
    eighth = session.queue.slots.capacity // 8 // 4
    easy_s = session.transport._rests.easy_s
    assert easy_s() == pytest.approx(0.05)
    offer(session, 1, size=eighth + 4096)
    assert easy_s() == pytest.approx(0.005)
    offer(session, 2, 3, 4, size=eighth)
    assert easy_s() == 0


def test_a_capture_that_leaves_less_than_seven_eighths_free_ends_the_rest_of_the_client_thread(
    peer: Peer, make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session()
    wait_until(lambda: session.transport.state is State.RUNNING)
    monkeypatch.setattr("capd_client.transport.rests.IDLE_TICK_S", 3600.0)
    wait_until(lambda: session.transport._wakeup.dozing)
    offer(session, 1, size=16)
    assert session.transport._wakeup.dozing
    offer(session, 2, size=session.queue.slots.capacity // 8 // 4 + 4096)
    wait_until(lambda: session.snapshot().committed == 2)
    monkeypatch.undo()
    session.transport._wakeup.wake()


def test_a_connection_given_up_in_a_forked_child_closes_nobody_elses_descriptor(peer: Peer) -> None:
    hello = Hello(protocol=PROTOCOL_VERSION, client=b"c" * 16, connection=1, rank=0, arena_nbytes=4096)
    arena = os.memfd_create("arena")
    os.ftruncate(arena, 4096)
    link = Link(peer.path)
    link.greet(arena, hello)
    wait_until(lambda: peer.hellos)  # the peer opens and closes descriptors of its own until then
    number = link._socket.fileno()
    link.close_in_child()
    other = os.dup2(arena, number)  # whatever the child opens next
    del link
    gc.collect()
    try:
        assert os.fstat(other)
    finally:
        os.close(other)
        os.close(arena)


def test_close_says_goodbye_with_final_counters(peer: Peer, make_session: Callable[..., Session]) -> None:
    session = make_session()
    offer(session, 1, 2, 3)
    session.offer(torch.ones(3, dtype=torch.complex64), KEY, session.context.moment())
    assert session.close(10)
    assert peer.byes == 1
    unsupported = 4 + REASON_INDEX[DropReason.UNSUPPORTED]
    assert peer.words[:4] == [COUNTER_MAGIC, 4, 3, 0]
    assert peer.words[unsupported] == 1
    offer(session, 4)
    assert session.snapshot().offered == 4, "after close nothing is offered any more"
    assert session.snapshot().committed == 3


def test_close_waits_its_time_for_a_lost_daemon_and_counts_what_is_lost(
    socket_path: str, make_session: Callable[..., Session]
) -> None:
    peer = Peer(socket_path, ack=False)
    session = make_session()
    offer(session, 1, 2)
    wait_until(lambda: len(peer.puts) == 2)
    peer.close()
    started = time.monotonic()
    assert not session.close(0.3)
    assert 0.3 <= time.monotonic() - started < 10
    now = session.snapshot()
    assert (now.in_flight, now.dropped) == (0, {"not_connected": 2})


def test_close_does_not_wait_without_a_daemon(make_session: Callable[..., Session]) -> None:
    session = make_session()
    offer(session, 1)
    started = time.monotonic()
    assert not session.close()
    assert time.monotonic() - started < 10
    assert session.snapshot().dropped == {"not_connected": 1}


def test_close_does_not_wait_for_a_vanished_daemon_when_nothing_is_in_flight(
    socket_path: str, make_session: Callable[..., Session]
) -> None:
    peer = Peer(socket_path)
    session = make_session()
    offer(session, 1)
    assert session.flush(10)
    peer.close()
    started = time.monotonic()
    assert session.close(20)
    assert time.monotonic() - started < 10


def test_a_socket_nobody_listens_on_is_as_good_as_none(
    socket_path: str, make_session: Callable[..., Session]
) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(socket_path)
    stale.close()
    session = make_session()
    wait_until(lambda: session.transport.refused.is_set())
    assert session.transport.welcome is None


def test_a_new_rank_is_introduced_by_a_new_hello(
    peer: Peer, make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    from capd_client.process import ranks

    session = make_session()
    offer(session, 1)
    assert session.flush(10)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    monkeypatch.setattr(ranks, "distributed_ready", lambda: True)
    monkeypatch.setattr("capd_client.steps.context.distributed_ready", lambda: True)

    assert session.context.bind() == 3

    wait_until(lambda: [hello.rank for hello in peer.hellos] == [0, 3])
    offer(session, 2)
    assert session.flush(10)
