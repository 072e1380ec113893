"""A rank's connection over a real socket pair, with a pipeline that does what the test says."""

from __future__ import annotations

import gc
import os
import socket
import struct
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest

from capd.errors import StoreError
from capd.server.connections import rank as module
from capd.server.connections.rank import ConnectionContext, serve_rank
from capd.server.net.peer import Peer, PeerGone, Refusal
from capd.server.net.sender import SendLoop
from capd.server.pipeline.jobs import RecordJob
from capd.server.rank.arena import Arena
from capd.server.rank.orders import Orders
from capd.server.rank.rank import MAX_IN_WORK_NBYTES, RankSession
from capd.server.rank.session import RECORD_NBYTES, Phase, Session
from capd.server.rank.steering import RunSteering
from capd.server.runs.registry import Registry
from capd.window.keeper import NoRecorder
from capd_client.protocol.control import Drain, Drained, Keep, KeepReply, Steer, Steered
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import (
    Ack,
    Bye,
    ByeOk,
    ClientMessage,
    DaemonMessage,
    Define,
    Descriptor,
    Flush,
    Hello,
    Nack,
    Ping,
    Pong,
    Put,
    Reject,
    Welcome,
    decode_daemon,
    encode,
)
from capd_client.protocol.selection import Selection
from tests.kit.client.memory import NBYTES, memfd

CLIENT = b"c" * 16
MAX_IN_WORK = MAX_IN_WORK_NBYTES // RECORD_NBYTES  # plain captures
DEFINE = Define(id=0, key=Key(quant_type="bf16", rank=0, tensor_name="x"), dtype="bfloat16")


@dataclass
class FakeRegistry:
    """Admits one client; its jobs pile up in `jobs`."""

    rank: RankSession | None = None
    handle: int | None = None  # stands for the rank's process: readable once it is dead
    jobs: list[RecordJob] = field(default_factory=list)
    steering: RunSteering = field(default_factory=RunSteering)

    def admit(self, hello: Hello, fd: int, process: int | None) -> RankSession:
        arena = Arena(fd, hello.arena_nbytes)
        if self.rank is None:
            session = Session(hello.client, "run")
            self.rank = RankSession(
                session, hello, arena, lambda *new: self.jobs.extend(new), lambda *_: None, 0, self.steering
            )
        if self.handle is not None and process is not None:
            os.dup2(self.handle, process)  # the connection polls this very descriptor
        reject = self.rank.connect(hello, arena, process)
        if reject is not None:
            raise Refusal(reject.code, reject.message)
        return self.rank


class Line:
    """One connection: the daemon's side runs in a thread, the rank's side is the test's."""

    def __init__(self, context: ConnectionContext, ordinal: int) -> None:
        ours, theirs = socket.socketpair()
        self.peer, self.frames = Peer(theirs), Connection(ours.detach())
        self.ended: BaseException | None = None
        self.thread = threading.Thread(target=self._serve, args=(context,))
        self.thread.start()
        self.send(Hello(protocol=2, client=CLIENT, connection=ordinal, rank=0, arena_nbytes=NBYTES))

    def _serve(self, context: ConnectionContext) -> None:
        try:
            serve_rank(context, self.peer, memfd(), lambda: None)
        except (PeerGone, Refusal) as error:
            self.ended = error
        finally:
            self.peer.close()

    def send(self, message: ClientMessage) -> None:
        self.frames.send_bytes(encode(message))

    def receive(self) -> DaemonMessage:
        assert self.frames.poll(10)
        return decode_daemon(self.frames.recv_bytes())

    def close(self) -> None:
        self.frames.close()
        self.thread.join()


@dataclass
class Stage:
    registry: FakeRegistry
    context: ConnectionContext
    closing: int
    saves: list[Future[None]]
    hurried: list[None]  # one for each time that something is not to wait for more
    lines: list[Line] = field(default_factory=list)

    def connect(self, ordinal: int = 1) -> Line:
        line = Line(self.context, ordinal)
        self.lines.append(line)
        return line

    @property
    def rank(self) -> RankSession:
        assert self.registry.rank is not None
        return self.registry.rank


@pytest.fixture
def stage() -> Iterator[Stage]:
    registry, closing, saves = FakeRegistry(), os.eventfd(0), [Future[None]()]
    hurried: list[None] = []
    context = ConnectionContext(
        registry=cast("Registry", registry),
        root=Path("/captures"),
        epoch=b"e" * 16,
        closing=closing,
        drained_by=lambda: 0.0,
        save=lambda _: saves[0],
        hurry=lambda: hurried.append(None),
        sending=SendLoop(),
        keeper=NoRecorder(),
    )
    made = Stage(registry, context, closing, saves, hurried)
    yield made
    for line in made.lines:
        line.close()
    made.rank.release()
    context.sending.stop()
    os.close(closing)


def batch(first: int, count: int) -> Put:
    return Put([Descriptor(first + at, 4096, 2, 0, (1,), Moment()) for at in range(count)])


def filled(stage: Stage, line: Line) -> None:
    """Put as much in work as is allowed, plus one batch the daemon does not read."""
    line.send(DEFINE)
    for first in range(0, MAX_IN_WORK + 64, 64):
        line.send(batch(first, 64))


def test_a_rank_with_too_much_in_work_is_not_read_but_told_that_the_daemon_lives(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    monkeypatch.setattr(module, "PING_INTERVAL_S", 0.02)
    line = stage.connect()
    assert isinstance(line.receive(), Welcome)
    filled(stage, line)

    assert [line.receive() for _ in range(3)] == [Pong()] * 3
    assert len(stage.registry.jobs) == MAX_IN_WORK

    for job in list(stage.registry.jobs):
        job.sink.committed([job.sequence])
    wait_until(lambda: len(stage.registry.jobs) == MAX_IN_WORK + 64)


def test_a_flush_and_a_record_from_beyond_the_first_quarter_of_the_arena_do_not_wait_for_more(
    stage: Stage, wait_until: Callable[..., None]
) -> None:
    line = stage.connect()
    line.receive()
    line.send(DEFINE)
    line.send(batch(1, 1))
    wait_until(lambda: len(stage.registry.jobs) == 1)
    line.send(Put([Descriptor(2, NBYTES // 4 + 64, 2, 0, (1,), Moment())]))
    wait_until(lambda: len(stage.registry.jobs) == 2)
    line.send(batch(3, 1))
    line.send(Flush(1, 3))
    line.send(Ping())
    assert line.receive() == Pong()  # all of it is read
    assert len(stage.hurried) == 2


def test_bye_is_answered_once_the_work_is_done_and_the_counters_are_saved(
    stage: Stage, wait_until: Callable[..., None]
) -> None:
    line = stage.connect()
    line.receive()
    line.send(DEFINE)
    line.send(batch(1, 2))
    line.send(Bye())
    wait_until(lambda: stage.rank.session.phase is Phase.ENDED)
    stage.saves[0].set_result(None)
    jobs = stage.registry.jobs
    jobs[0].sink.committed([1])
    jobs[1].sink.refused(2, DropReason.DISK_FULL, "full")

    answers: list[Any] = [line.receive()]
    while not isinstance(answers[-1], ByeOk):
        answers.append(line.receive())
    line.thread.join()
    assert stage.rank.at_rest


def test_without_a_saved_row_bye_is_not_confirmed(stage: Stage) -> None:
    line = stage.connect()
    line.receive()
    stage.saves[0].set_exception(StoreError("disk"))
    line.send(Bye())
    line.thread.join(10)

    with pytest.raises((EOFError, ConnectionResetError)):
        line.receive()


def test_replies_that_wait_are_sent_before_the_last_word_at_shutdown(
    stage: Stage, wait_until: Callable[..., None]
) -> None:
    line = stage.connect()
    line.receive()
    line.send(DEFINE)
    line.send(batch(1, 3))
    wait_until(lambda: len(stage.registry.jobs) == 3)
    for job in stage.registry.jobs[:2]:
        job.sink.committed([job.sequence])
    stage.registry.jobs[2].sink.refused(3, DropReason.STORE_ERROR, "gone")
    os.eventfd_write(stage.closing, 1)

    answers = [line.receive()]
    while not isinstance(answers[-1], Reject):
        answers.append(line.receive())
    acked = [reply for reply in answers if isinstance(reply, Ack)]
    assert sorted(pair for reply in acked for pair in reply.ranges)[0][0] == 1
    assert any(isinstance(reply, Nack) for reply in answers)
    assert answers[-1] == Reject("closing", "the daemon is shutting down", True)


def test_a_superseded_connection_hands_nothing_more_to_the_pipeline(stage: Stage) -> None:
    first = stage.connect(1)
    first.receive()
    first.send(DEFINE)
    second = stage.connect(2)
    assert isinstance(second.receive(), Welcome)
    first.thread.join(10)
    assert not first.thread.is_alive()

    assert stage.rank.put(1, batch(1, 2)) is False
    assert stage.registry.jobs == []
    third = stage.connect(1)
    third.thread.join(10)
    assert isinstance(third.ended, Refusal)
    assert third.ended.reject.code == "superseded"


def test_released_sessions_keep_their_counters_but_not_the_arena(stage: Stage) -> None:
    line = stage.connect()
    line.receive()
    line.close()
    rank = stage.rank
    before = rank.row()

    rank.release()

    assert rank.row() == before
    assert rank._arena is None
    assert rank.put(1, batch(1, 1)) is False


@pytest.fixture
def victim(stage: Stage) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the rank's; the test kills it, the test's own end of the socket stays open."""
    process = subprocess.Popen(["sleep", "600"])
    stage.registry.handle = os.pidfd_open(process.pid)
    yield process
    os.close(stage.registry.handle)
    process.kill()
    process.wait()


def test_everything_a_dead_rank_sent_is_read_however_long_it_is_held_back(
    stage: Stage,
    victim: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[..., None],
) -> None:
    monkeypatch.setattr(module, "DRAIN_S", 0.01)
    monkeypatch.setattr(module, "PING_INTERVAL_S", 0.02)
    line = stage.connect()
    assert isinstance(line.receive(), Welcome)
    filled(stage, line)
    victim.kill()
    victim.wait()
    assert [line.receive() for _ in range(5)] == [Pong()] * 5  # held back for longer than DRAIN_S

    for job in list(stage.registry.jobs):
        job.sink.committed([job.sequence])
    line.thread.join(10)

    assert not line.thread.is_alive()
    assert len(stage.registry.jobs) == MAX_IN_WORK + 64


def test_half_a_frame_of_a_dead_rank_does_not_keep_its_connection(
    stage: Stage, victim: subprocess.Popen[bytes], wait_until: Callable[..., None]
) -> None:
    line = stage.connect()
    assert isinstance(line.receive(), Welcome)
    line.send(DEFINE)
    line.send(batch(1, 1))
    os.write(line.frames.fileno(), struct.pack("!i", 1000) + b"half")
    wait_until(lambda: len(stage.registry.jobs) == 1)
    stage.rank.check_process(grace_s=None)
    assert stage.rank.connected
    victim.kill()
    victim.wait()

    stage.rank.check_process(grace_s=None)  # the clock's look
    line.thread.join(10)

    assert not line.thread.is_alive()
    assert stage.rank.session.phase is Phase.DIED


def test_an_ended_connection_is_freed_without_the_garbage_collector(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []

    class Recorded(module._RankConnection):
        def __init__(self, *parts: Any) -> None:
            made.append(weakref.ref(self))
            super().__init__(*parts)

    monkeypatch.setattr(module, "_RankConnection", Recorded)
    gc.disable()
    try:
        line = stage.connect()
        line.receive()
        line.close()
        assert made[0]() is None
    finally:
        gc.enable()


def test_records_of_a_key_that_cannot_be_stored_are_refused_and_the_rank_goes_on(
    stage: Stage, wait_until: Callable[..., None]
) -> None:
    line = stage.connect()
    line.receive()
    line.send(Define(id=0, key=DEFINE.key, dtype="bfloat16", attributes={"raw": b"1"}))
    line.send(batch(1, 1))
    answer = line.receive()
    assert isinstance(answer, Nack)
    assert "JSON" in answer.rows[0].message

    line.send(Define(id=1, key=DEFINE.key, dtype="bfloat16"))
    line.send(Put([Descriptor(2, 4096, 2, 1, (1,), Moment())]))
    wait_until(lambda: len(stage.registry.jobs) == 1)
    assert [row.reason for row in stage.rank.row().drops] == [DropReason.BAD_DESCRIPTOR.value]


def order(stage: Stage, at: int, *, capturing: bool = False) -> Steer:
    steer = stage.registry.steering.order(capturing=capturing, selection=None, from_iteration=at, begun=[])
    stage.rank.order(Orders.steer)
    return steer


def answered(line: Line) -> None:
    """Return once everything sent before was handled."""
    line.send(Ping())
    while not isinstance(line.receive(), Pong):
        pass


def test_an_order_reaches_the_rank_once_and_again_on_its_next_connection(stage: Stage) -> None:
    line = stage.connect()
    assert isinstance(line.receive(), Welcome)
    steer = order(stage, 7)
    assert line.receive() == steer
    stage.rank.order(Orders.steer)
    answered(line)
    line.close()

    line = stage.connect(2)
    assert isinstance(line.receive(), Welcome)
    assert line.receive() == steer
    line.send(Steered(id=steer.id, in_force=steer, since=7))
    answered(line)
    assert stage.rank.orders.steered is not None
    stage.rank.order(Orders.steer)
    line.send(Ping())
    assert isinstance(line.receive(), Pong)


def test_a_drain_is_asked_and_answered_over_a_reconnect(stage: Stage) -> None:
    line = stage.connect()
    assert isinstance(line.receive(), Welcome)
    drain = Drain(5)
    stage.rank.order(lambda orders: orders.drain(drain))
    assert line.receive() == drain
    line.close()

    line = stage.connect(2)
    assert isinstance(line.receive(), Welcome)
    assert line.receive() == drain
    line.send(Drained(5))
    answered(line)
    assert stage.rank.orders.drained == 5


def test_a_rank_that_claims_an_impossible_selection_breaks_the_protocol(stage: Stage) -> None:
    line = stage.connect()
    assert isinstance(line.receive(), Welcome)
    line.send(Steered(id=1, in_force=Steer(id=1, from_iteration=0, selection=Selection(steps="os"))))
    answer = line.receive()
    assert isinstance(answer, Reject)
    assert answer.code == "malformed"
    assert stage.registry.steering.wanted is None


def test_a_keep_of_a_rank_is_answered_with_why_nothing_is_kept(stage: Stage) -> None:
    line = stage.connect()
    assert isinstance(line.receive(), Welcome)
    line.send(Keep(7, "loss spike", 12))
    answer = line.receive()
    assert isinstance(answer, KeepReply)
    assert (answer.id, "put iterations = 8 into [window]" in answer.problem) == (7, True)
