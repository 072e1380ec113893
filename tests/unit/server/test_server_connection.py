"""A rank's connection over a real socket pair, with a pipeline that does what the test says."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest
from test_server_arena import NBYTES, memfd

from capd.errors import StoreError
from capd.server import connection as module
from capd.server.arena import Arena
from capd.server.connection import ConnectionContext, serve_rank
from capd.server.peer import Peer, PeerGone
from capd.server.pipeline import Job
from capd.server.rank import MAX_IN_WORK, RankSession
from capd.server.registry import Refusal, Registry
from capd.server.session import Phase, Session
from capd_client.key import Key, Moment
from capd_client.protocol import (
    Ack,
    Bye,
    ByeOk,
    ClientMessage,
    DaemonMessage,
    Define,
    Descriptor,
    DropReason,
    Hello,
    Nack,
    Pong,
    Put,
    Reject,
    Welcome,
    decode_daemon,
    encode,
)

CLIENT = b"c" * 16
DEFINE = Define(id=0, key=Key(quant_type="bf16", rank=0, tensor_name="x"), dtype="bfloat16")


@dataclass
class FakeRegistry:
    """Admits one client; its jobs pile up in `jobs`."""

    rank: RankSession | None = None
    jobs: list[Job] = field(default_factory=list)

    def admit(self, hello: Hello, fd: int, process: int | None) -> RankSession:
        arena = Arena(fd, hello.arena_nbytes)
        if self.rank is None:
            self.rank = RankSession(Session(hello.client, "run"), hello, arena, self.jobs.append, 0)
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
        self.send(Hello(protocol=1, client=CLIENT, connection=ordinal, rank=0, arena_nbytes=NBYTES))

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
    context = ConnectionContext(
        registry=cast("Registry", registry),
        root=Path("/captures"),
        epoch=b"e" * 16,
        closing=closing,
        drained_by=lambda: 0.0,
        save=lambda _: saves[0],
    )
    made = Stage(registry, context, closing, saves)
    yield made
    for line in made.lines:
        line.close()
    made.rank.release()
    os.close(closing)


def batch(first: int, count: int) -> Put:
    return Put([Descriptor(first + at, 4096, 2, 0, (1,), Moment()) for at in range(count)])


def filled(stage: Stage, line: Line) -> None:
    """Put as much in work as is allowed, plus one batch the daemon does not read."""
    line.send(DEFINE)
    for first in range(0, MAX_IN_WORK + 64, 64):
        line.send(batch(first, 64))


def test_a_rank_with_too_much_in_work_is_not_read_but_told_that_the_daemon_lives(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PING_INTERVAL_S", 0.02)
    line = stage.connect()
    assert isinstance(line.receive(), Welcome)
    filled(stage, line)

    assert [line.receive() for _ in range(3)] == [Pong()] * 3
    assert len(stage.registry.jobs) == MAX_IN_WORK

    for job in list(stage.registry.jobs):
        job.sink.committed(job.sequence)
    while len(stage.registry.jobs) == MAX_IN_WORK:
        line.receive()
    assert len(stage.registry.jobs) == MAX_IN_WORK + 64


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
    jobs[0].sink.committed(1)
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
        job.sink.committed(job.sequence)
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
