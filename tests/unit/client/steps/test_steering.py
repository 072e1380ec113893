"""What `capd ctl` wants takes effect between two iterations, on the thread that trains, and is told to the daemon."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from capd_client.process.log import RateLimitedLog
from capd_client.protocol.control import Drain, Drained, Steer, Steered
from capd_client.protocol.counter_page import COUNTER_STEPS
from capd_client.protocol.key import Key
from capd_client.protocol.selection import Selection
from capd_client.session.session import Session
from capd_client.steps.steering import Steering
from tests.kit.client.peer import Peer, wait_until

KEY = Key(quant_type="q", rank=0, tensor_name="x")


class FakeWatch:
    def __init__(self, modules: int = 1, error: Exception | None = None) -> None:
        self.steers: list[Steer] = []
        self._modules, self._error = modules, error

    def steer(self, steer: Steer) -> int:
        self.steers.append(steer)
        if self._error is not None:
            raise self._error
        return self._modules


class Told:
    """A Steering and what it told the queue."""

    def __init__(self) -> None:
        self.capturing: list[bool] = []
        self.steering = Steering(self.capturing.append, RateLimitedLog())


def stop(number: int, at: int) -> Steer:
    return Steer(id=number, from_iteration=at, capturing=False)


def test_an_order_waits_for_its_iteration_and_then_holds() -> None:
    told, watch = Told(), FakeWatch(3)
    steering = told.steering
    steering.add(watch)
    steering.begin(0)
    assert steering.answer is None

    steering.receive(stop(5, at=2))
    assert steering.answer == Steered(id=5, pending=stop(5, 2))
    steering.begin(1)
    assert told.capturing == []
    steering.begin(4)

    assert told.capturing == [False]
    assert watch.steers == [stop(5, 2)]
    assert steering.answer == Steered(id=5, in_force=stop(5, 2), since=4, modules=3)


def test_the_newest_order_counts_and_a_repeated_or_older_one_does_not() -> None:
    told = Told()
    steering = told.steering
    steering.receive(stop(5, at=2))
    steering.receive(Steer(id=6, from_iteration=3))
    steering.receive(stop(5, at=0))
    steering.begin(2)
    assert told.capturing == []
    steering.begin(3)
    assert told.capturing == [True]

    steering.receive(Steer(id=6, from_iteration=0))
    steering.begin(4)
    assert told.capturing == [True]
    assert steering.answer == Steered(id=6, in_force=Steer(id=6, from_iteration=3), since=3)


def test_a_model_that_is_watched_later_follows_too() -> None:
    told, early, late = Told(), FakeWatch(2), FakeWatch(1)
    told.steering.add(early)
    told.steering.receive(stop(1, at=0))
    told.steering.begin(0)
    told.steering.add(late)

    assert late.steers == [stop(1, 0)]
    assert told.steering.answer is not None
    assert told.steering.answer.modules == 3
    told.steering.discard(early)
    told.steering.receive(Steer(id=2, from_iteration=0))
    told.steering.begin(1)
    assert len(early.steers) == 1


def test_what_cannot_be_read_or_followed_is_told_and_nothing_is_raised() -> None:
    told = Told()
    bad = Steer(id=1, from_iteration=0, selection=Selection(steps="soon"))
    told.steering.receive(bad)
    told.steering.begin(0)
    assert told.capturing == []
    assert told.steering.answer is not None
    assert "as a range" in told.steering.answer.problem

    told.steering.add(FakeWatch(error=RuntimeError("no")))
    told.steering.add(FakeWatch(2))
    told.steering.receive(stop(2, at=1))
    told.steering.begin(1)
    assert told.capturing == [False]
    assert (told.steering.answer.problem, told.steering.answer.modules) == ("RuntimeError: no", 2)


def capture(session: Session, count: int = 1) -> None:
    for _ in range(count):
        session.context.begin_if_dirty()
        session.offer(torch.ones(4), KEY, session.context.moment())


def test_a_stopped_session_counts_what_it_is_offered_and_takes_it_again_when_started(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session()
    wait_until(lambda: session.transport.welcome)
    capture(session)
    peer.send(stop(1, at=1))
    wait_until(lambda: session.steering.answer)
    capture(session)
    session.context.optimizer_stepped()
    capture(session, 3)
    peer.send(Steer(id=2, from_iteration=2))
    wait_until(lambda: session.steering.answer.id == 2)  # type: ignore[union-attr]
    capture(session)
    session.context.optimizer_stepped()
    capture(session)
    assert session.flush(10)

    counters = session.snapshot()
    assert (counters.offered, counters.committed, counters.dropped) == (7, 3, {"stopped": 4})
    assert [record.descriptor.moment.iteration for record in peer.records] == [0, 0, 2]
    wait_until(lambda: peer.steered and peer.steered[-1].since == 2)
    assert peer.steered[-1].in_force == Steer(id=2, from_iteration=2)
    wait_until(lambda: [(row.count, row.last_iteration) for row in list(peer.drops.values())] == [(4, 1)])


def test_the_counter_page_says_how_many_iterations_have_begun(make_session: Callable[..., Session]) -> None:
    session = make_session()
    words, context = session.arena.words, session.context
    assert words[COUNTER_STEPS] == 0
    context.begin_micro_batch()
    context.begin_micro_batch()
    assert words[COUNTER_STEPS] == 1
    context.optimizer_stepped()
    assert words[COUNTER_STEPS] == 1
    context.begin_micro_batch()
    assert words[COUNTER_STEPS] == 2
    context.set_moment(iteration=99)
    assert words[COUNTER_STEPS] == 100


def test_a_new_connection_is_told_how_the_rank_is_steered(
    socket_path: str, make_session: Callable[..., Session]
) -> None:
    first = Peer(socket_path)
    session = make_session()
    wait_until(lambda: session.transport.welcome)
    first.send(stop(1, at=0))
    wait_until(lambda: session.steering.answer)
    session.context.begin_micro_batch()
    first.close()

    second = Peer(socket_path)
    try:
        wait_until(lambda: second.steered)
        assert second.steered == [Steered(id=1, in_force=stop(1, 0), since=0)]
    finally:
        second.close()


def test_a_drain_is_answered_once_everything_before_it_is_settled(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    peer.ack = False
    session = make_session()
    capture(session, 3)
    wait_until(lambda: len(peer.records) == 3)
    peer.send(Drain(7))
    capture(session)
    wait_until(lambda: len(peer.records) == 4)
    assert peer.drained == []

    peer.acknowledge_all()
    wait_until(lambda: peer.drained == [Drained(7)])


def test_a_forked_child_follows_nothing(peer: Peer, make_session: Callable[..., Session]) -> None:
    session = make_session()
    wait_until(lambda: session.transport.welcome)
    peer.send(stop(1, at=0))
    wait_until(lambda: session.steering.answer)
    with session.queue.lock:  # as a thread that the child does not have may hold it
        child = os.fork()
        if child == 0:
            session.forked()
            session.context.begin_micro_batch()
            os._exit(0 if session.steering.answer.in_force is None else 1)  # type: ignore[union-attr]
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("iteration", [0, 5, 2**63 - 1])
def test_captures_that_name_their_iteration_only_move_on(
    iteration: int, make_session: Callable[..., Session]
) -> None:
    session = make_session()
    session.context.reach(iteration)
    session.context.reach(0)
    assert session.arena.words[COUNTER_STEPS] == iteration + 1
