"""Deaths of ranks: the last iterations are kept once the lanes are through, and nothing of a rank is remembered."""

from __future__ import annotations

import socket
import subprocess
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, cast

import pytest

from capd.server.pipeline.pipeline import Pipeline
from capd.server.rank.rank import RankSession
from capd.server.runs.run import Run
from capd.server.runs.upkeep import Upkeep
from capd.store.catalog.rows import SessionRow
from tests.unit.server.recorder.desk import Desk, DeskRank


@dataclass
class Store:
    """A pipeline that saves every row at once, and knows what the lanes of the desk have committed."""

    desk: Desk
    rows: list[SessionRow] = field(default_factory=list)

    def save_session(self, run_id: str, row: SessionRow) -> Future[None]:
        self.rows.append(row)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def committed(self, run_id: str, client: bytes) -> list[tuple[int, int]]:
        return self.desk.lanes.committed(client)


class Clock:
    """The daemon's clock with ranks that live and die as a test says."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.store = desk, Store(desk)
        self.run = Run("run", desk.run)
        self.upkeep = Upkeep(cast("Pipeline", self.store), Lock(), 10.0)

    def rank(self, begun: int, number: int = 0, attempt: int = 0) -> Any:
        """A rank that is in its iteration `begun`."""
        rank = SimpleNamespace(
            hello=SimpleNamespace(attempt=attempt, rank=number), shift=0, alive=True, died=False, reached=begun,
            last_iteration=begun, session=self.desk.rank(number).session, process=SimpleNamespace(end="SIGKILL"),
        )  # fmt: skip
        self.run.ranks[bytes([number]) * 16] = cast("RankSession", rank)
        return rank

    def tick(self, seconds: float = 3.0) -> None:
        self.upkeep.window(self.desk.recorder, self.run, self.desk.now)
        self.desk.turn(seconds)
        self.desk.lanes.commit()


def kill(rank: Any) -> None:
    rank.alive, rank.died = False, True


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(Desk(tmp_path))


def train(clock: Clock, rank: Any, iterations: range, number: int = 0) -> None:
    for iteration in iterations:
        rank.reached = rank.last_iteration = iteration
        clock.desk.put(iteration, number)
        clock.tick()


def test_the_death_of_a_rank_keeps_the_last_iterations_of_all(clock: Clock) -> None:
    first, second = clock.rank(0), clock.rank(0, 1)
    for iteration in range(6):
        train(clock, first, range(iteration, iteration + 1))
        train(clock, second, range(iteration, iteration + 1), 1)
    kill(second)
    clock.tick()
    assert clock.desk.kept == [3, 3, 4, 4, 5, 5]
    [keep] = clock.desk.recorder.stats("run").keeps
    assert (keep.reason, keep.iteration) == ("rank 1 died (SIGKILL)", 5)


def test_the_death_of_a_rank_that_holds_nothing_keeps_what_the_others_have(clock: Clock) -> None:
    """It had captured nothing yet, as a rank of a pipeline's other stage."""
    rank = clock.rank(0)
    idle = clock.rank(0, 1)
    train(clock, rank, range(4))
    idle.last_iteration = 3
    kill(idle)
    clock.tick()
    assert clock.desk.kept == [1, 2, 3]


def test_a_death_is_heard_when_the_captures_are_through_the_lanes(clock: Clock) -> None:
    rank = clock.rank(0)
    train(clock, rank, range(2))
    jobs = [clock.desk.job(iteration) for iteration in (2, 3)]
    rank.last_iteration = 3
    kill(rank)
    # However long they take, nothing leaves.
    for _ in range(3):
        clock.tick(seconds=100.0)
    assert (clock.desk.held, clock.desk.kept) == ([0, 1], [])
    for job in jobs:
        clock.desk.take(job)
    clock.tick()
    assert clock.desk.kept == [1, 2, 3]
    clock.tick()
    clock.tick()
    clock.desk.assert_exact()
    assert not clock.desk.rank().session.held


def test_an_orderly_end_keeps_nothing(clock: Clock) -> None:
    rank = clock.rank(0)
    train(clock, rank, range(3))
    rank.alive = False
    for _ in range(3):
        clock.tick()
    assert (clock.desk.kept, clock.desk.held) == ([], [])
    assert clock.desk.recorder.stats("run").keeps == []


def test_a_run_is_not_quiet_while_something_is_held(clock: Clock) -> None:
    rank = clock.rank(0)
    train(clock, rank, range(1))
    assert clock.run.holds
    clock.run.ranks.clear()
    for _ in range(3):
        clock.tick()
    assert not clock.run.holds


def row_of(rank: DeskRank, *, pid: int, state: str = "live") -> SessionRow:
    """The row that a killed daemon left."""
    return SessionRow(
        client=rank.client, rank=0, attempt=0, host=socket.gethostname(), pid=pid, started_ns=1, ended_ns=None,
        state=state, offered=rank.sent, committed=0, in_flight=rank.sent, dropped={},
    )  # fmt: skip


@pytest.fixture
def vanished() -> int:
    """The id of a process that is gone."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_rank_that_vanished_while_no_daemon_ran_keeps_what_is_held(clock: Clock, vanished: int) -> None:
    for iteration in range(4):
        clock.desk.put(iteration)
    clock.desk.start()
    client = clock.desk.rank().client
    clock.run.finished[client] = row_of(clock.desk.rank(), pid=vanished)
    for _ in range(3):
        clock.tick()
    assert clock.desk.kept == [1, 2, 3]
    row = clock.run.finished[client]
    assert (row.state, row.offered, row.committed, row.in_flight, row.dropped) == (
        "died", 4, 3, 0, {"expired": 1},
    )  # fmt: skip
    assert clock.store.rows[-1] == row


def test_the_row_of_a_rank_that_vanished_is_settled_also_if_nothing_of_it_is_held(
    clock: Clock, vanished: int
) -> None:
    rank = clock.desk.rank()
    clock.desk.put(0)
    clock.desk.look(9)
    clock.desk.turn()
    clock.desk.start()
    clock.run.finished[rank.client] = row_of(rank, pid=vanished)
    clock.tick()
    row = clock.run.finished[rank.client]
    assert (row.state, row.in_flight, row.dropped) == ("died", 0, {"expired": 1})
    assert row.ended_ns is not None


def test_nothing_of_a_rank_that_is_gone_is_remembered(clock: Clock, vanished: int) -> None:
    run = clock.desk.recorder._runs["run"]
    for number in range(8):
        clock.desk.put(0, number, attempt=number)
        clock.run.finished[bytes([number]) * 16] = row_of(clock.desk.rank(number), pid=vanished)
    for _ in range(4):
        clock.tick()
    assert (run.accounts, run.committed, clock.run.mourned, clock.run.absent_since) == ({}, {}, set(), {})
    assert [row.clean for row in clock.run.finished.values()] == [True] * 8


def test_a_rank_goes_when_the_recorder_has_heard_of_its_death(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capd.server.runs.upkeep.log_end", lambda *_: None)
    rank = clock.rank(3)
    client = next(iter(clock.run.ranks))
    row = row_of(clock.desk.rank(), pid=1, state="died")
    rank.client, rank.lost, rank.at_rest, rank.why_full, rank.row = client, False, True, "", lambda: row
    rank.run_id, rank.process.end_may_follow, rank.quant_types = "run", False, set()
    rank.check_process = rank.release = rank.release_arena = lambda **_: None
    rank.hello.world_size, rank.session = 1, SimpleNamespace(quant_types=set(), in_work={})
    clock.store.forget = lambda client: None  # type: ignore[attr-defined]
    kill(rank)
    for _ in range(3):
        clock.upkeep.ranks(clock.run, clock.desk.now, clock.desk.recorder)
        clock.desk.now += 1
    assert client in clock.run.ranks

    clock.tick()
    clock.upkeep.ranks(clock.run, clock.desk.now, clock.desk.recorder)
    assert clock.run.ranks == {}
    assert clock.run.mourned == set()
    assert clock.desk.recorder._runs["run"].accounts == {}
