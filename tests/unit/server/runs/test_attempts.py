"""The attempt of a rank: a job that continues a run counts on, and all ranks of one job get the same shift."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest

from capd.server.runs.attempts import Member, shift_of
from capd_client.protocol.messages import Hello
from tests.kit.store.cli import session_row

IDLE_S = 10.0
# Stands for the time at which a test runs.
JUST_NOW = -1


def hello(**changes: Any) -> Hello:
    values: dict[str, Any] = {
        "protocol": 2,
        "client": bytes(16),
        "connection": 1,
        "rank": 0,
        "arena_nbytes": 1,
    }
    return Hello(**{**values, "world_size": 2, **changes})


def member(rank: int = 0, attempt: int = 0, shift: int = 0, **changes: Any) -> Member:
    """A session that ended long ago."""
    values: dict[str, Any] = {"world_size": 2, "started_ns": 1, "ended_ns": 2, "runs": False}
    return Member(rank, attempt, shift, **{**values, **changes})


@pytest.mark.parametrize(
    ("new", "members", "shift"),
    [
        pytest.param({}, [], 0, id="a new run"),
        pytest.param({"attempt": 3}, [], 0, id="a restarted job in a new run"),
        pytest.param({}, [member()], 1, id="a job after a job"),
        pytest.param({"rank": 1}, [member()], 1, id="a later job whose other rank comes first"),
        pytest.param({}, [member(attempt=2)], 3, id="a job after one with two restarts"),
        pytest.param({"attempt": 1}, [member()], 0, id="a restart of the job"),
        pytest.param(
            {"attempt": 1}, [member(), member(attempt=3, shift=3, started_ns=9)], 3, id="of the second job"
        ),
        pytest.param(
            {"attempt": 7}, [member(), member(attempt=3, shift=3)], 0, id="a job that was told to count on"
        ),
        pytest.param({"rank": 1}, [member(runs=True)], 0, id="beside a running rank"),
        pytest.param({}, [member(runs=True)], 0, id="a second process of a running rank"),
        pytest.param({"rank": 1}, [member(ended_ns=JUST_NOW)], 0, id="after a rank that was short"),
        pytest.param({}, [member(ended_ns=JUST_NOW)], 1, id="the same rank again"),
        pytest.param(
            {"rank": 1, "world_size": 3}, [member(ended_ns=JUST_NOW)], 1, id="a job of another size"
        ),
        pytest.param({"rank": 1}, [member(runs=None, ended_ns=None)], 0, id="beside a rank of another node"),
        pytest.param({}, [member(runs=None, ended_ns=None)], 1, id="the rank of a node that is gone"),
        pytest.param(
            {"rank": 1},
            [member(started_ns=99), member(attempt=1, shift=1, started_ns=5, ended_ns=None, runs=True)],
            1,
            id="after a job whose node had a fast clock",
        ),
    ],
)
def test_a_rank_gets_the_attempt_of_its_job(new: dict[str, Any], members: list[Member], shift: int) -> None:
    members = [one._replace(ended_ns=time.time_ns()) if one.ended_ns == JUST_NOW else one for one in members]

    assert shift_of(hello(**new), members, idle_s=IDLE_S) == shift


def test_records_without_sessions_are_attempts_too() -> None:
    assert shift_of(hello(), [], idle_s=IDLE_S, stored=0) == 1
    assert shift_of(hello(), [], idle_s=IDLE_S, stored=4) == 5


def test_all_ranks_of_a_job_get_one_shift_in_any_order() -> None:
    members = [member(rank) for rank in range(4)]
    for rank in (3, 0, 2, 1):
        shift = shift_of(hello(rank=rank), members, idle_s=IDLE_S)
        assert shift == 1
        members.append(member(rank, shift, shift, started_ns=9, ended_ns=None, runs=True))


def test_a_session_that_a_killed_daemon_left_runs_if_its_process_is_older() -> None:
    row = session_row(state="live", host=socket.gethostname(), pid=os.getpid(), started_ns=time.time_ns())
    assert Member.of_row(row).runs is True
    row.started_ns = 1  # another process has the number now
    assert Member.of_row(row).runs is False
    row.pid = 2**22 + 1  # no process can have it
    row.started_ns = time.time_ns()
    assert Member.of_row(row).runs is False
    row.host = "elsewhere"
    assert Member.of_row(row).runs is None
