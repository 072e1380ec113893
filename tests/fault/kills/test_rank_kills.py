"""SIGKILL to one of eight ranks in the middle of its captures, again and again: the others never notice."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest

from tests.fault.kit import figures
from tests.kit.checking import assert_balanced
from tests.kit.crowd import Crowd
from tests.kit.processes import Daemon, at_rest, live_stats, until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

RANKS, KILLS = 8, 20
LONGEST_GAP_S = 20.0  # on any machine; the figure is what counts


def test_kills_of_ranks_in_the_middle_of_captures_never_stall_the_others(
    daemon: Daemon, tmp_path: Path
) -> None:
    generator = random.Random(7)
    crowd = Crowd(tmp_path / "crowd", daemon.endpoint, CAPD_POLICY="block", CAPD_ARENA_BYTES=str(4 << 20))
    try:
        for rank in range(RANKS):
            crowd.start(rank, pause_s=0.001, nbytes=generator.choice([4 << 10, 64 << 10, 512 << 10]))
        for _ in range(KILLS):
            threading.Event().wait(generator.uniform(0.05, 0.5))
            victim = generator.randrange(1, RANKS)  # rank 0 sees them all
            os.kill(crowd.pids[victim], signal.SIGKILL)
            crowd.start(victim, pause_s=0.001, nbytes=generator.choice([4 << 10, 64 << 10, 512 << 10]))
        reports = crowd.finish()
    finally:
        crowd.close()

    until(lambda: all(map(at_rest, live_stats(daemon.endpoint)["sessions"])))
    stats = live_stats(daemon.endpoint)
    daemon.stop()
    assert len(stats["sessions"]) <= RANKS + KILLS  # one may have been killed before it was connected
    for session in stats["sessions"]:
        assert_balanced(session)
    assert_balanced(stats)
    ended = {session["rank"]: session for session in stats["sessions"] if session["state"] == "ended"}
    assert set(ended) == set(reports) == set(range(RANKS))
    for rank, report in reports.items():
        assert report["counters"] == {name: ended[rank][name] for name in report["counters"]}
    longest = max(report["longest_gap_s"] for report in reports.values())
    assert longest < LONGEST_GAP_S
    figures.note(
        "ranks killed",
        kills=KILLS,
        committed=stats["committed"],
        rank_died=stats["dropped"].get("rank_died", 0),
        longest_gap_of_rank_0_ms=round(1000 * reports[0]["longest_gap_s"]),
        longest_gap_ms=round(1000 * longest),
    )
