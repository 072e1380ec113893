"""Many real ranks that start at once on one node are all taken, each by its first HELLO."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.checking import assert_balanced
from tests.kit.crowd import Crowd
from tests.kit.processes import Daemon, live_stats, until

RANKS = 64


@pytest.mark.slow
def test_ranks_that_start_at_once_are_all_taken_by_their_first_hello(daemon: Daemon, tmp_path: Path) -> None:
    crowd = Crowd(tmp_path / "crowd", daemon.endpoint, CAPD_ARENA_BYTES=str(1 << 20))
    try:
        for rank in range(RANKS):
            crowd.start(rank, pause_s=0.1, nbytes=4 << 10)
        until(lambda: len(live_stats(daemon.endpoint)["sessions"]) == RANKS, 60)
        reports = crowd.finish()
    finally:
        crowd.close()

    assert set(reports) == set(range(RANKS))
    assert {report["connections"] for report in reports.values()} == {1}
    for report in reports.values():
        assert report["flushed"]
        assert_balanced(report["counters"])
        assert report["counters"]["committed"] == report["counters"]["offered"]
