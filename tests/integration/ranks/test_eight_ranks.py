"""Eight ranks share one node's daemon: none starves another, whatever it offers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.checking import assert_balanced
from tests.kit.crowd import Crowd
from tests.kit.processes import Daemon, live_stats, until

RANKS = 8
LEAST = 150  # committed of every rank before the counts are compared
FAIR = 3.0  # the most that one rank gets, of what the least gets, where all want more than there is


@contextlib.contextmanager
def crowd_of(tmp_path: Path, daemon: Daemon, **environment: str) -> Iterator[Crowd]:
    crowd = Crowd(tmp_path / "crowd", daemon.endpoint, **environment)
    try:
        yield crowd
    finally:
        crowd.close()


def sessions(daemon: Daemon) -> dict[int, dict[str, Any]]:
    return {session["rank"]: session for session in live_stats(daemon.endpoint)["sessions"]}


def all_have(daemon: Daemon, least: int) -> bool:
    now = sessions(daemon)
    return len(now) == RANKS and all(session["committed"] >= least for session in now.values())


def assert_exact(reports: dict[int, dict[str, Any]], daemon: Daemon) -> None:
    """Each rank's own counters, and the daemon's word on it."""
    until(lambda: all(session["state"] == "ended" for session in sessions(daemon).values()))
    told = sessions(daemon)
    assert set(reports) == set(told) == set(range(RANKS))
    for rank, report in reports.items():
        own = report["counters"]
        assert report["flushed"]
        assert_balanced(own)
        assert_balanced(told[rank])
        assert {name: told[rank][name] for name in own} == own


def test_ranks_that_all_want_more_than_there_is_get_alike(daemon: Daemon, tmp_path: Path) -> None:
    with crowd_of(tmp_path, daemon, CAPD_POLICY="block", CAPD_ARENA_BYTES=str(1 << 20)) as crowd:
        for rank in range(RANKS):
            crowd.start(rank)
        until(lambda: all_have(daemon, 1), 60)
        before = {rank: session["committed"] for rank, session in sessions(daemon).items()}
        until(lambda: all_have(daemon, max(before.values()) + LEAST), 60)
        after = {rank: session["committed"] for rank, session in sessions(daemon).items()}
        reports = crowd.finish()

    got = [after[rank] - before[rank] for rank in range(RANKS)]
    assert max(got) <= FAIR * min(got), got
    assert all(report["counters"]["dropped"] == {} for report in reports.values())
    assert_exact(reports, daemon)


@pytest.mark.fault
def test_a_rank_that_floods_costs_the_others_nothing(daemon: Daemon, tmp_path: Path) -> None:
    """It offers as fast as it can, they a hundred times a second: what does not fit is dropped, and is its own."""
    with crowd_of(tmp_path, daemon, CAPD_POLICY="drop", CAPD_ARENA_BYTES=str(8 << 20)) as crowd:
        for rank in range(1, RANKS):
            crowd.start(rank, pause_s=0.02, nbytes=4 << 10)
        crowd.start(0, nbytes=64 << 10)
        until(lambda: all_have(daemon, LEAST), 60)
        reports = crowd.finish()

    for rank in range(1, RANKS):
        assert reports[rank]["counters"]["dropped"] == {}
    assert reports[0]["counters"]["offered"] > 8 * max(
        reports[rank]["counters"]["offered"] for rank in range(1, RANKS)
    )
    assert_exact(reports, daemon)
