"""What samples derive from a daemon's counters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from capd.live.events import MAX_EVENTS
from capd.live.sampler import Sampler
from capd.live.state import MAX_RUNS, main_reason
from tests.kit.live.answers import Answers, run, session


@pytest.fixture
def daemon(runtime_dir: Path) -> Iterator[Answers]:
    answers = Answers(runtime_dir / "s.sock")
    answers.start()
    yield answers
    answers.stop()


@pytest.fixture
def sampler(daemon: Answers) -> Iterator[Sampler]:
    found = Sampler(daemon.path, clock=lambda: daemon.now, wall_ns=lambda: int(daemon.now * 1e9))
    yield found
    found.close()


def test_rates_are_derived_for_each_rank_and_run(daemon: Answers, sampler: Sampler) -> None:
    for second in range(4):
        daemon.now = float(second)
        daemon.runs = [
            run(sessions=[session(r, committed=second * (10 + r)) for r in (1, 0)], committed=21 * second)
        ]
        node = sampler.sample().node
    assert node is not None
    [found] = node.runs

    assert found.rate == 21
    assert [(rank.rank, rank.rate) for rank in found.ranks] == [(0, 10), (1, 11)]
    assert sampler.rates("run", points=60)[-3:] == [21, 21, 21]
    assert sampler.rates("run", found.ranks[1].client)[-1] == 11
    assert sampler.rates("run", "nobody") == [None] * 60


def test_a_rank_is_behind_the_front_and_keeps_its_last_iteration(daemon: Answers, sampler: Sampler) -> None:
    daemon.runs = [run(sessions=[session(0, iteration=7), session(1, iteration=4), session(2)])]
    node = sampler.sample().node
    assert node is not None
    assert [(rank.iteration, rank.behind) for rank in node.runs[0].ranks] == [(7, 0), (4, 3), (None, None)]
    assert node.runs[0].iteration == 7

    daemon.runs = [
        run(sessions=[session(0, state="ended", connected=False), session(1, iteration=5, connected=False)])
    ]
    node = sampler.sample().node
    assert node is not None
    first, second = node.runs[0].ranks
    assert (first.state, first.iteration, first.behind) == ("ended", 7, None)
    assert (second.state, second.iteration, second.behind) == ("lost", 5, 0)
    # The front is among those that are there.
    assert node.runs[0].iteration == 5


def test_only_the_newest_attempt_of_a_rank_is_shown(daemon: Answers, sampler: Sampler) -> None:
    daemon.runs = [
        run(sessions=[session(0, client="a" * 32, state="died"), session(0, attempt=1), session(1)])
    ]
    node = sampler.sample().node
    assert node is not None

    assert [(rank.rank, rank.attempt) for rank in node.runs[0].ranks] == [(0, 1), (1, 0)]
    assert node.runs[0].earlier == 1


def test_chosen_drops_are_no_losses(daemon: Answers, sampler: Sampler) -> None:
    dropped = {"sampled": 90, "arena_full": 3, "quota": 5, "ring_full": 0}
    daemon.runs = [run(sessions=[session(0, dropped=dropped)], dropped=dropped)]
    node = sampler.sample().node
    assert node is not None

    assert node.runs[0].dropped == {"arena_full": 3, "quota": 5}
    assert node.runs[0].left_out == node.runs[0].ranks[0].left_out == {"sampled": 90}
    assert main_reason(node.runs[0].ranks[0].dropped) == "quota"
    assert main_reason({}) == ""


@pytest.mark.parametrize(
    ("free", "stored", "max_disk", "room", "full_in_s"),
    [
        # 10 B/s go, 840 B above what is kept free are left.
        (lambda s: 1000 - 10 * s, lambda _: 0, None, 840, 84),
        # Another process makes room while captures take it: what captures take counts.
        (lambda _: 1000, lambda s: 20 * s, None, 900, 45),
        (lambda _: 1000, lambda s: 20 * s, 200, 80, 4),
        (lambda _: 1000, lambda _: 0, None, 900, None),
        (lambda _: 50, lambda _: 0, None, 0, None),
    ],
    ids=["disk", "captures", "max_disk", "at rest", "full"],
)
def test_the_disk_has_a_forecast(
    daemon: Answers, sampler: Sampler, free: Any, stored: Any, max_disk: Any, room: int, full_in_s: Any
) -> None:
    for second in range(7):
        daemon.now = float(second)
        daemon.more = {"disk_free": free(second), "max_disk": max_disk}
        daemon.runs = [run(stored_bytes=stored(second))]
        node = sampler.sample().node
        assert node is not None
        # Nothing is foretold from four seconds.
        assert second >= 5 or node.full_in_s is None

    assert (node.room, node.full_in_s) == (room, full_in_s)


def test_a_daemon_that_is_gone_leaves_its_last_values_and_comes_back(
    daemon: Answers, sampler: Sampler
) -> None:
    daemon.runs = [run(sessions=[session(0, committed=5)], committed=5)]
    before = sampler.sample()
    daemon.stop()
    daemon.now = 3.0
    gone = sampler.sample()

    assert gone.gone
    assert gone.node is before.node
    assert gone.silent_s == 3
    assert sampler.sample().problem.startswith(f"no daemon at {daemon.path}")

    daemon.pid = 2
    daemon.start()
    daemon.runs = [run(sessions=[session(0, committed=1)], committed=1)]
    back = sampler.sample()
    assert not back.gone
    assert back.node is not None
    assert back.node.runs[0].rate is None
    assert [event.text for event in sampler.events if "daemon" in event.text][-1] == (
        "the daemon was started again (pid 2)"
    )


def test_nothing_is_known_without_any_daemon(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path / "no.sock")
    found = sampler.sample()

    assert found.node is None
    assert "start `capd serve`" in found.problem
    assert sampler.sample().silent_s == 0
    # It is said once, and not every second.
    assert len(sampler.events) == 1


def test_events_tell_of_ranks_that_come_and_go_and_of_drops(daemon: Answers, sampler: Sampler) -> None:
    def texts() -> list[str]:
        found = [event.text for event in sampler.events][texts.seen :]
        texts.seen += len(found)
        return found

    texts.seen = 0
    daemon.runs = [run(sessions=[session(0)])]
    sampler.sample()
    assert texts() == ["rank 0 here"]
    daemon.runs = [run(sessions=[session(rank) for rank in range(64)])]
    sampler.sample()
    assert texts() == ["ranks 1-63 joined"]
    daemon.runs = [
        run(
            sessions=[session(0), session(1, state="died", end="SIGKILL"), session(2, connected=False)],
            dropped={"arena_full": 2, "stopped": 9},
        )
    ]
    sampler.sample()
    assert texts() == [
        "rank 1 died (SIGKILL)", "rank 2 lost the connection", "2 captures dropped, arena_full",
    ]  # fmt: skip
    assert sampler.events[-3].severity == "critical"
    daemon.runs[0].dropped["arena_full"] = 7
    daemon.now = 2.0
    sampler.sample()
    assert texts() == []
    daemon.now = 11.0
    sampler.sample()
    assert texts() == ["5 captures dropped, arena_full"]
    daemon.now = 30.0
    sampler.sample()
    assert texts() == []
    # It came and died between two samples.
    daemon.runs[0].sessions.append(session(7, state="died", end="exit code 3", connected=False))
    sampler.sample()
    assert texts() == ["rank 7 died (exit code 3)"]


def test_samples_are_bounded(daemon: Answers, sampler: Sampler) -> None:
    daemon.runs = [run("live", [session(0)]), *(run(f"run-{n}") for n in range(200))]
    node = sampler.sample().node
    assert node is not None
    # The live one stays, though it is the oldest.
    assert [found.run_id for found in node.runs] == [
        "live",
        *(f"run-{n}" for n in range(201 - MAX_RUNS, 200)),
    ]
    assert node.omitted_runs == 201 - MAX_RUNS

    for second in range(300):
        daemon.now = float(second)
        daemon.runs = [run("live", [session(0, connected=bool(second % 2))])]
        sampler.sample()
    assert len(sampler.events) == MAX_EVENTS
    assert sampler.events_total > MAX_EVENTS
    # Runs that are not there any more are forgotten.
    assert sampler.rates("run-199") == [None] * 60
    assert len(sampler._tracks) == 5


def test_ranks_that_do_not_fit_a_frame_are_asked_for_alone(daemon: Answers, sampler: Sampler) -> None:
    daemon.runs = [run(offered=3)]
    daemon.alone = {"run": run(sessions=[session(rank) for rank in range(1024)], offered=3)}
    node = sampler.sample().node
    assert node is not None
    assert len(node.runs[0].ranks) == 1024
    daemon.alone = {"run": run(offered=3)}
    node = sampler.sample().node
    assert node is not None
    assert node.runs[0].omitted_ranks == 1


def test_an_answer_of_another_version_is_a_problem_and_no_error(daemon: Answers, sampler: Sampler) -> None:
    daemon.beyond = {"of_a_later_version": 1}

    assert "another layout" in sampler.sample().problem
