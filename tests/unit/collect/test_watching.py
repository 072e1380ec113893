"""When a job of a collection run is ended, and what its ending is called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from capd.collect.request import CollectionRequest
from capd.collect.watching import COLLECTED, Ending, Observation, Watcher
from capd_client.protocol.quota import Collected

ASKED = CollectionRequest("single", ("mxfp8",), 2, 1, "complete", 60.0, 900.0)


def rank(number: int, state: Any, kept: int = 2, ranks: int = 1, pid: int = 1) -> Collected:
    return Collected(rank=number, local_world_size=ranks, host="h", pid=pid, kept=kept, state=state)


def outcome(watcher: Watcher, now_s: float, *ranks: Collected, records: int = 0, **seen: bool) -> str | None:
    ending = watcher.look(Observation(now_s, ranks, records, **seen))
    return None if ending is None else ending.outcome


def test_it_is_complete_once_every_local_rank_is() -> None:
    watcher = Watcher(ASKED, 0.0)

    assert outcome(watcher, 1) is None
    assert outcome(watcher, 2, rank(0, "complete", ranks=2), records=5) is None  # the other has not begun
    assert outcome(watcher, 3, rank(0, "complete", ranks=2), rank(1, "collecting", 1, 2), records=9) is None
    assert watcher.micro_batches == 1
    assert outcome(watcher, 4, rank(0, "complete", ranks=2), rank(1, "reached", 2, 2), records=10) is None
    assert (
        outcome(watcher, 5, rank(0, "complete", ranks=2), rank(1, "complete", 2, 2), records=10) == "complete"
    )
    assert watcher.micro_batches == 2


def test_of_a_rank_that_was_restarted_the_process_that_got_farthest_counts() -> None:
    ranks = (rank(0, "complete", pid=1), rank(0, "collecting", 0, pid=2))

    assert outcome(Watcher(ASKED, 0.0), 1, *ranks, records=1) == "complete"


def test_the_backward_of_the_last_micro_batch_is_waited_for_however_long_it_takes() -> None:
    waits, ends = Watcher(ASKED, 0.0), Watcher(replace(ASKED, until="stable"), 0.0)

    for watcher in (waits, ends):
        assert outcome(watcher, 10, rank(0, "reached"), records=7) is None
        assert outcome(watcher, 69, rank(0, "reached"), records=7) is None
    assert outcome(ends, 70, rank(0, "reached"), records=7) == "stable"
    assert outcome(waits, 899, rank(0, "reached"), records=7) is None
    assert outcome(waits, 900, rank(0, "reached"), records=7) == "timeout"


def test_a_rank_that_captures_nothing_is_waited_for_as_long_as_records_come() -> None:
    watcher = Watcher(ASKED, 0.0)

    assert outcome(watcher, 10, rank(0, "complete", ranks=2), records=7) is None
    assert outcome(watcher, 69, rank(0, "complete", ranks=2), records=7) is None
    ending = watcher.look(Observation(70, [rank(0, "complete", ranks=2)], 7))
    assert ending is not None
    assert ending.outcome == "complete"
    assert (
        ending.reason == "2 micro-batches of 1 of 2 ranks (the rest captures nothing), no new record for 60 s"
    )
    assert watcher.micro_batches == 2


def test_stable_is_an_ending_only_where_it_was_asked_for_and_something_has_come() -> None:
    waits, ends = Watcher(ASKED, 0.0), Watcher(replace(ASKED, until="stable"), 0.0)

    assert outcome(ends, 100) is None  # nothing yet: it may still load its data
    for now, records in ((110, 1), (160, 2), (219, 2)):
        assert outcome(ends, now, records=records) is None
        assert outcome(waits, now, records=records) is None
    assert outcome(ends, 220, records=2) == "stable"
    assert outcome(waits, 220, records=2) is None


def test_time_space_and_the_daemon_end_it() -> None:
    assert outcome(Watcher(ASKED, 5.0), 904.9, records=1) is None
    assert outcome(Watcher(ASKED, 5.0), 905.0, records=1) == "timeout"
    assert outcome(Watcher(replace(ASKED, timeout_s=0.0), 5.0), 1e9) is None
    assert outcome(Watcher(ASKED, 0.0), 1, records=1, disk_full=True) == "full"
    assert outcome(Watcher(replace(ASKED, micro_batches=0), 0.0), 1, records=1, disk_full=True) == "ended"
    assert outcome(Watcher(ASKED, 0.0), 1, records=1, daemon_ended=True) == "daemon"
    full = outcome(Watcher(ASKED, 0.0), 1, rank(0, "complete"), records=1, disk_full=True)
    assert full == "full"  # all are taken, and some were refused


@pytest.mark.parametrize(
    ("code", "ranks", "records", "asked", "expected"),
    [
        (0, [rank(0, "reached")], 5, ASKED, "complete"),
        (0, [rank(0, "reached", ranks=2)], 5, ASKED, "complete"),
        (0, [rank(0, "collecting", 1)], 5, ASKED, "incomplete"),
        (0, [rank(0, "collecting", 1, ranks=2)], 5, ASKED, "incomplete"),
        (0, [rank(0, "collecting", 1)], 5, replace(ASKED, micro_batches=0), "ended"),
        (0, [], 5, ASKED, "ended"),  # nothing is watched: the script captures by itself
        (0, [rank(0, "collecting", 0)], 0, ASKED, "nothing"),
        (1, [rank(0, "complete")], 5, ASKED, "failed"),
        (137, [], 0, ASKED, "failed"),
    ],
)
def test_the_ending_of_a_job_that_ended_by_itself(
    code: int, ranks: list[Collected], records: int, asked: CollectionRequest, expected: str
) -> None:
    ending = Watcher(asked, 0.0).over(Observation(1.0, ranks, records), None, code)

    assert ending.outcome == expected
    assert (expected in COLLECTED) == (expected in ("complete", "ended"))
    assert code == 0 or str(code) in ending.reason


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({}, "complete"),
        ({"records": 0}, "nothing"),
        ({"disk_full": True, "lost": 3}, "full"),
        ({"daemon_ended": True}, "daemon"),
    ],
)
def test_a_job_that_was_ended_as_complete_is_so_only_if_its_captures_are_stored(
    seen: dict[str, Any], expected: str
) -> None:
    look = Observation(**{"now_s": 1.0, "ranks": [rank(0, "complete")], "records": 5, **seen})

    assert Watcher(ASKED, 0.0).over(look, Ending("complete", "all"), 0).outcome == expected


def test_drops_are_said_beside_whatever_the_ending_is() -> None:
    look = Observation(1.0, [rank(0, "complete")], 5, lost=1234)

    assert Watcher(ASKED, 0.0).over(look, Ending("complete", "all"), 0) == Ending(
        "complete", "all; 1,234 captures were dropped"
    )
    assert Watcher(ASKED, 0.0).over(look, Ending("timeout", "late"), 0).reason.startswith("late; 1,234")
