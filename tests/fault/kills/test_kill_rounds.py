"""SIGKILL at random moments, many times over: acked records lost must be 0, duplicates 0, wrong values 0."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from tests.kit.checking import assert_balanced, captured_numbers, listed_numbers
from tests.kit.processes import Daemon, StartRank, at_rest, live_stats, until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(900)]

DAEMON_KILLS = 12
RANK_KILLS = 10


def pause(generator: random.Random, longest_s: float) -> None:
    """Let a random time pass: the moment of the kill is the input of these tests."""
    threading.Event().wait(generator.uniform(0, longest_s))


def test_daemon_killed_at_random_moments(daemon: Daemon, start_rank: StartRank, tmp_path: Path) -> None:
    generator = random.Random(20260101)
    run = tmp_path / "store" / "run.zarr"
    ranks = [start_rank(number) for number in range(2)]
    for rank in ranks:
        rank.ask("stream 0")
    acked = [0, 0]
    for _ in range(DAEMON_KILLS):
        # Both ranks are back (they knock at growing intervals); only then is a kill in the middle of something.
        until(
            lambda least=acked: all(
                r.ask("counters")["committed"] > n for r, n in zip(ranks, least, strict=True)
            )
        )
        pause(generator, 0.6)
        daemon.kill()
        acked = [rank.ask("counters")["committed"] for rank in ranks]
        for number, count in enumerate(acked):
            assert listed_numbers(run, number)[:count] == list(range(count))
        daemon.start()

    totals = [rank.ask("halt") for rank in ranks]
    for rank, total in zip(ranks, totals, strict=True):
        assert rank.ask("flush 60") is True
        assert rank.ask("counters") == {"offered": total, "committed": total, "in_flight": 0, "dropped": {}}
        rank.leave()
    daemon.stop()
    assert [captured_numbers(run, number) for number in range(2)] == [list(range(total)) for total in totals]


def test_ranks_killed_at_random_moments(daemon: Daemon, start_rank: StartRank, tmp_path: Path) -> None:
    generator = random.Random(20260102)
    run = tmp_path / "store" / "run.zarr"
    survivor = start_rank(0)
    survivor.ask("stream 0")
    for number in range(1, RANK_KILLS + 1):
        victim = start_rank(number)
        victim.ask("stream 0")
        pause(generator, 0.5)
        victim.kill()
    at = survivor.ask("counters")["committed"]
    until(lambda: survivor.ask("counters")["committed"] > at + 20)
    total = survivor.ask("halt")
    assert survivor.ask("flush") is True
    survivor.leave()
    until(lambda: all(map(at_rest, live_stats(daemon.endpoint)["sessions"])))
    stats = live_stats(daemon.endpoint)
    daemon.stop()

    assert_balanced(stats)
    for session in stats["sessions"]:
        assert_balanced(session)
        assert captured_numbers(run, session["rank"]) == list(range(session["committed"]))
    assert captured_numbers(run, 0) == list(range(total))


def test_everything_killed_again_and_again(daemon: Daemon, start_rank: StartRank, tmp_path: Path) -> None:
    generator = random.Random(20260103)
    run = tmp_path / "store" / "run.zarr"
    kept: dict[int, list[int]] = {}
    for number in range(5):
        rank = start_rank(number)
        rank.ask("stream 0")
        until(lambda rank=rank: rank.ask("counters")["committed"] > 5)
        pause(generator, 0.5)
        acked = rank.ask("counters")["committed"]
        daemon.kill()
        rank.kill()
        kept[number] = captured_numbers(run, number)
        assert kept[number] == list(range(len(kept[number])))
        assert len(kept[number]) >= acked
        daemon.start()
    daemon.stop()
    assert {number: captured_numbers(run, number) for number in kept} == kept
