"""Keeps: what they keep, what they answer, and what a storm of them costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from capd.server.recorder import run_keeps
from capd.server.recorder.keeps_file import KeepsFile
from capd.server.recorder.run_keeps import KEEPS_PER_MINUTE
from tests.unit.server.recorder.desk import Desk


def train(desk: Desk, iterations: range, **where: int) -> None:
    for iteration in iterations:
        desk.put(iteration, **where)
        desk.look(iteration, attempt=where.get("attempt", 0))
        desk.turn()


def lines(desk: Desk) -> list[bytes]:
    return (desk.run / ".capd/node=n/window/keeps.jsonl").read_bytes().splitlines()


def test_a_keep_keeps_the_last_iterations_and_those_that_follow(tmp_path: Path) -> None:
    desk = Desk(tmp_path, post=1)
    train(desk, range(9))
    assert desk.keep(reason="loss") == ""
    desk.turn()
    desk.lanes.commit()
    train(desk, range(9, 12))
    desk.lanes.commit()

    assert desk.kept == [6, 7, 8, 9]
    stored = desk.lanes.stored[desk.rank().client]
    assert {job.descriptor.metadata for _, job in stored.values()} == {
        b'{"trigger": {"reason": "loss", "iteration": 8}}'
    }


def test_a_keep_of_what_is_gone_says_so(tmp_path: Path) -> None:
    desk = Desk(tmp_path, post=0)
    train(desk, range(9))

    assert desk.keep(3) == "iterations 1 to 3 are gone; held are 6 to 8"
    assert desk.keep(6) == ""
    assert desk.keep(1 << 60) == f"{1 << 60} is no iteration"
    assert "does not know run 'other'; it has run" in desk.recorder.keep("other", None, "why")


def test_a_keep_while_nothing_is_held_keeps_what_follows_or_says_why_not(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert desk.keep() == "no iteration is held, and no rank is in one"
    desk.look(4)
    assert desk.keep() == ""
    desk.turn()
    assert desk.put(5) is False

    later = Desk(tmp_path / "later")
    later.put(0)
    later.end()
    assert later.keep(0) == "iterations 0 to 3 are gone; held are none"


def test_a_keep_is_applied_when_it_is_answered(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    train(desk, range(3))
    assert desk.keep() == ""
    desk.look(50)
    desk.turn()
    desk.lanes.commit()
    assert desk.kept == [0, 1, 2]


def test_a_keep_that_cannot_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path)
    desk.put(0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(KeepsFile, "append", full)
        assert desk.keep() == ""
        desk.turn()
    assert [job.descriptor.moment.iteration for job in desk.lanes.jobs] == [0]
    desk.turn()
    assert len(lines(desk)) == 1


def test_a_keep_of_an_older_attempt_is_of_that_attempt(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.put(7, attempt=0)
    desk.put(2, number=1, attempt=1)
    desk.recorder.look("run", {0: 7, 1: 2}, ())
    assert desk.keep(attempt=0) == ""
    desk.turn()
    desk.lanes.commit()
    assert desk.kept == [7]


def test_a_rank_that_asks_at_each_step_is_heard_some_times_a_minute(tmp_path: Path) -> None:
    desk = Desk(tmp_path, post=0)
    refused = []
    for iteration in range(10 * KEEPS_PER_MINUTE):
        desk.put(iteration)
        desk.look(iteration)
        if problem := desk.keep(iteration, asker="rank 0"):
            refused.append(problem)
        desk.turn(0.01)
        desk.lanes.commit()
    assert set(refused) == {"rank 0 has asked for 20 keeps within a minute; ask less often"}
    assert len(lines(desk)) == KEEPS_PER_MINUTE
    # Others are heard, and so is the rank after a minute.
    assert desk.keep(asker="rank 1") == ""
    desk.put(10_000)
    desk.turn(60.0)
    assert desk.keep(10_000, asker="rank 0") == ""
    desk.assert_exact()


def test_a_keep_of_what_is_kept_costs_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path, post=500)
    desk.put(0)
    desk.look(0)
    for _ in range(3 * KEEPS_PER_MINUTE):
        assert desk.keep(0, asker="rank 0") == ""
    desk.turn()
    assert len(lines(desk)) == 1


def test_the_keeps_of_a_run_are_bounded_and_its_end_is_heard_beyond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_keeps, "MAX_KEEPS", 3)
    desk = Desk(tmp_path, post=0)
    for iteration in range(3):
        desk.put(iteration)
        assert desk.keep(iteration) == ""
    desk.put(3)
    assert desk.keep(3) == "this run has 3 keeps already; write to another run"
    assert desk.keep(3, is_last=True) == ""
    for node_keep in range(20):
        desk.put(10 + node_keep)
        desk.keep(10 + node_keep, is_last=True)
    desk.turn()
    assert len(lines(desk)) == 6


def test_keeps_outlive_the_daemon(tmp_path: Path) -> None:
    desk = Desk(tmp_path, post=2)
    train(desk, range(3))
    assert desk.keep(reason="r" * 1000) == ""
    desk.turn()
    desk.start()
    desk.turn()
    desk.lanes.commit()
    desk.turn()
    assert desk.kept == [0, 1, 2]
    assert desk.put(4) is False
    assert [len(keep.reason) for keep in desk.recorder.stats("run").keeps] == [200]


def test_another_node_hears_of_a_keep(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    train(desk, range(3))
    place = KeepsFile(desk.run, "m")
    place.tell(run_keeps.make_keep("their rule", 0, 2, 3, 1, "m"))
    desk.turn()
    desk.turn()
    desk.lanes.commit()
    assert desk.kept == [0, 1, 2]
    assert b'"node":"m"' in lines(desk)[0]


def test_other_nodes_hear_of_two_keeps_of_one_iteration(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    train(desk, range(3))
    assert [desk.keep(2, post=0), desk.keep(2, post=5)] == ["", ""]
    desk.turn()

    told = KeepsFile(desk.run, "m").told()
    assert sorted((keep.iteration, keep.first, keep.last) for keep in told) == [(2, 0, 2), (2, 0, 7)]


def test_the_jobs_own_trigger_in_its_metadata_stays(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.put(0, metadata=b'{"trigger": "mine"}')
    desk.put(0, metadata=b'{"step": 3}')
    assert desk.keep(0) == ""
    desk.turn()
    assert [job.descriptor.metadata for job in desk.lanes.jobs] == [
        b'{"trigger": "mine"}',
        b'{"step": 3, "trigger": {"reason": "why", "iteration": 0}}',
    ]
