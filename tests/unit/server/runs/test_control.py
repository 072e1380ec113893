"""What a tool is told about ranks that follow, refuse, die, leave or are overruled while it waits."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import cast

import pytest

from capd.server.rank.arena import Arena
from capd.server.rank.orders import Orders
from capd.server.rank.rank import RankSession
from capd.server.rank.session import Session
from capd.server.runs import control
from capd.server.runs.control import Controller
from capd.server.runs.registry import Registry
from capd.server.runs.run import Run
from capd_client.protocol.bounds import MAX_TEXT_CHARS
from capd_client.protocol.control import Control, ControlReply, Drain, Drained, Steer, Steered
from capd_client.protocol.messages import Hello, decode_daemon, encode
from capd_client.protocol.selection import Selection
from tests.kit.client.memory import NBYTES, memfd


class Ranks:
    """A run with connected ranks, whose answers the test gives while a tool waits."""

    def __init__(self, count: int) -> None:
        self.run = Run("run", Path("/captures/run.zarr"))
        self.ranks = [self._join(number) for number in range(count)]
        self.shutdowns = 0
        self.kept: list[tuple[str, int | None, str]] = []
        self.keep_problem = ""
        self._controller = Controller(cast("Registry", self), self._shutdown, self)

    def keep(self, run_id: str, iteration: int | None, reason: str, *, post: int | None = None) -> str:
        self.kept.append((run_id, iteration, reason))
        return self.keep_problem

    def _join(self, number: int) -> RankSession:
        hello = Hello(
            protocol=2, client=os.urandom(16), connection=1, run_id="run", rank=number, arena_nbytes=NBYTES
        )
        fd = memfd()
        arena = Arena(fd, NBYTES)
        os.close(fd)
        session = Session(hello.client, "run")
        rank = RankSession(session, hello, arena, lambda *_: None, lambda *_: None, 0, self.run.steering)
        assert rank.connect(hello, arena, None) is None
        self.run.ranks[hello.client] = rank
        return rank

    def runs(self) -> list[Run]:
        return [self.run]

    def seal(self, run_id: str) -> Future[None]:
        return Registry.seal(cast("Registry", SimpleNamespace(_runs={"run": self.run}, _lock=Lock())), run_id)

    def _shutdown(self) -> None:
        self.shutdowns += 1

    def control(self, message: Control, *events: Callable[[], None]) -> ControlReply:
        """Give an order; while it waits, the events happen one after the other, then patience ends."""
        left = list(events)

        def wait(_: float) -> bool:
            if not left:
                return True
            left.pop(0)()
            return False

        return self._controller.control(message, wait)

    def follow(self, number: int, *, since: int = 7, modules: int = 1, problem: str = "") -> None:
        [steer] = [m for m in self.ranks[number].orders.take() if isinstance(m, Steer)]
        answer = Steered(id=steer.id, in_force=steer, since=since, modules=modules, problem=problem)
        self.ranks[number].order(lambda orders: orders.answered(answer))

    def drained(self, number: int) -> None:
        [drain] = [m for m in self.ranks[number].orders.take() if isinstance(m, Drain)]
        self.ranks[number].order(lambda orders: orders.answered(Drained(drain.id)))

    def die(self, number: int) -> None:
        self.ranks[number].apply(1, lambda session: session.die())


@pytest.fixture
def two() -> Ranks:
    return Ranks(2)


STOP = Control("stop", wait_s=60.0)


def test_it_is_done_once_every_rank_follows(two: Ranks) -> None:
    reply = two.control(STOP, lambda: two.follow(0), lambda: two.follow(1, since=8))

    assert reply.ok
    assert reply.message == "in force from iteration 7 and 8 on"
    assert [(rank["rank"], rank["since"], rank["capturing"]) for rank in reply.ranks] == [
        (0, 7, False),
        (1, 8, False),
    ]


def test_a_keep_asks_the_recorder_and_says_why_nothing_is_kept(two: Ranks) -> None:
    newest, around = (
        two.control(Control("keep")),
        two.control(Control("keep", iteration=12, reason="loss\x1b[2J")),
    )
    two.keep_problem = "the disk is full"
    refused = two.control(Control("keep", "run", reason="x"))

    assert (newest.code, around.code, refused.code) == ("ok", "ok", "failed")
    assert newest.message.startswith("run run: keeps the iterations around its newest iteration")
    assert around.message.startswith("run run: keeps the iterations around iteration 12")
    assert refused.message == "run run: nothing is kept: the disk is full"
    assert two.kept == [
        ("run", None, "capd ctl keep"), ("run", 12, "loss\N{REPLACEMENT CHARACTER}[2J"), ("run", None, "x"),
    ]  # fmt: skip
    assert two.control(Control("keep", "other")).code == "nothing"


def test_a_run_is_not_sealed_before_it_is_open_and_of_all_only_those_that_are(two: Ranks) -> None:
    unknown, early, everything = (two.control(Control("seal", run_id)) for run_id in ("nope", "run", None))

    assert (unknown.code, unknown.message) == ("nothing", "this daemon writes no run 'nope'; its runs: run")
    assert (early.code, early.message) == ("failed", "could not seal: run 'run' is not open yet; try again")
    assert (everything.code, everything.message) == ("ok", "no run to seal")


def test_who_has_not_followed_is_named_and_the_others_are_not(two: Ranks) -> None:
    reply = two.control(STOP, lambda: two.follow(0))

    assert reply.code == "failed"
    assert "rank 1 (before its first iteration)" in reply.message
    assert "rank 0" not in reply.message
    assert [rank["pending"] is None for rank in reply.ranks] == [True, False]


def test_a_rank_that_leaves_is_not_waited_for(two: Ranks) -> None:
    assert two.control(STOP, lambda: two.follow(0), lambda: two.die(1)).ok
    reply = two.control(Control("start", wait_s=60.0), lambda: two.die(0))
    assert (reply.code, reply.message) == ("failed", "every rank left before it took effect")
    assert two.control(STOP).code == "nothing"


def test_a_rank_that_cannot_follow_says_why(two: Ranks) -> None:
    reply = two.control(STOP, lambda: two.follow(0), lambda: two.follow(1, problem="no hooks"))

    assert (reply.code, reply.message) == ("failed", "rank 1 cannot follow: no hooks")


def test_a_later_order_overrules_one_that_is_waited_for(two: Ranks) -> None:
    def overrule() -> None:
        assert two.control(Control("start")).ok
        for number in range(2):
            two.follow(number)

    reply = two.control(STOP, overrule)

    assert (reply.code, reply.message) == ("failed", "a later order has taken the place of this one")
    assert two.run.steering.wanted is not None
    assert two.run.steering.wanted.capturing


def test_a_selection_that_matches_nothing_is_told_as_such(two: Ranks) -> None:
    def ask(**selection: str | tuple[str, ...]) -> ControlReply:
        message = Control("select", None, Selection(**selection), 7, 60.0)  # type: ignore[arg-type]
        return two.control(message, *(lambda n=n: two.follow(n, modules=0) for n in range(2)))

    assert "has such a name" in ask(modules=("nowhere",)).message
    assert "steps 0-6 end before iteration 7" in ask(steps="0-6").message
    assert "ranks 2-" in ask(ranks="2-").message
    assert ask(tensors=("input",)).code == "nothing"


def test_a_flush_succeeds_only_if_every_rank_drained_before_it_died(two: Ranks) -> None:
    flush = Control("flush", wait_s=60.0)
    assert two.control(flush, lambda: two.drained(0), lambda: two.drained(1)).ok

    reply = two.control(flush, lambda: two.drained(1), lambda: two.die(0))
    assert (reply.code, reply.message) == ("failed", "rank 0 died before it had sent everything")
    assert "rank 1 (before" in two.control(flush).message


def test_a_reply_that_no_frame_holds_comes_without_its_ranks() -> None:
    globs = tuple(f"{number:03}" + "x" * 250 for number in range(64))
    reply = Ranks(80).control(Control("select", None, Selection(modules=globs)))

    assert reply.ok
    assert reply.ranks == []


def test_only_shutdown_ends_the_daemon(two: Ranks) -> None:
    two.control(Control("stop"))
    assert two.shutdowns == 0
    assert two.control(Control("shutdown")).ok
    assert two.shutdowns == 1


def test_an_order_is_kept_for_a_rank_between_two_connections(two: Ranks) -> None:
    two.ranks[0].disconnect(1)
    assert two.control(Control("stop")).ok
    assert two.ranks[0].alive
    two.ranks[0].order(Orders.connected)
    assert [type(message) for message in two.ranks[0].orders.take()] == [Steer]


def test_what_a_rank_says_at_length_still_reaches_the_tool(two: Ranks) -> None:
    reply = two.control(STOP, lambda: two.follow(0, problem="x" * MAX_TEXT_CHARS), lambda: two.follow(1))

    assert reply.message.endswith("x…")
    assert decode_daemon(encode(reply)) == reply


def test_many_runs_in_a_message_still_reach_the_tool(two: Ranks) -> None:
    runs = [replace(two.run, run_id=f"{number:04}-" + "r" * 250) for number in range(100)]
    two.runs = lambda: runs  # type: ignore[method-assign]
    for reply in (two.control(STOP), two.control(Control("stop", "other"))):
        assert decode_daemon(encode(reply)) == reply


def test_a_tool_that_waits_long_looks_seldom(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = 0.0, 0

    def wait(seconds: float) -> bool:
        nonlocal now, looks
        now, looks = now + seconds, looks + 1
        return False

    monkeypatch.setattr(control, "time", SimpleNamespace(monotonic=lambda: now))
    assert (
        Controller(cast("Registry", two), two._shutdown).control(Control("stop", wait_s=3600.0), wait).code
        == "failed"
    )
    assert now == pytest.approx(3600.0)
    assert looks < 2 * 3600
