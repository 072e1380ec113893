"""The arena is as large as its use: pages come ahead of it and go after a long quiet; nothing is lost or miscounted."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import capd
from tests.integration.ranks import growing_job
from tests.kit.checking import assert_balanced
from tests.kit.processes import Daemon, Rank, StartRank, at_rest, live_stats, until

MIB = 1 << 20
SLACK_NBYTES = 64 * MIB
ARENA_NBYTES = 512 * MIB
FIRST = 100_000
JOB = Path(growing_job.__file__)


@pytest.fixture
def rank(start_rank: StartRank) -> Rank:
    """One that has captured number FIRST, and is connected."""
    rank = start_rank(command=(sys.executable, str(JOB)), CAPD_ARENA_BYTES=str(ARENA_NBYTES), CAPD_PING_S="5")
    rank.ask(f"capture {FIRST} {FIRST + 1} 8192")
    until(lambda: rank.ask("flush"), 60)
    return rank


def captured(run: Path) -> list[int]:
    """Numbers of all captures in the store, compared bit for bit."""
    found: list[int] = []
    for series in capd.open(run).find(tensor_name="x"):
        for index, record in enumerate(series.records):
            held = series.torch(index)
            assert held.equal(growing_job.tensor(record.iteration, held.numel()))
            found.append(record.iteration)
    return sorted(found)


def mapped_arenas(daemon: Daemon) -> list[int]:
    """Inodes of the arenas that the daemon has mapped."""
    assert daemon.process is not None
    lines = Path(f"/proc/{daemon.process.pid}/maps").read_text().splitlines()
    return [int(line.split()[4]) for line in lines if "capd-arena" in line]


def wait_for_fresh(rank: Rank, before: dict[str, Any]) -> dict[str, Any]:
    """Until the rank has given its memory back and has fresh one."""
    until(lambda: rank.ask("arena")["inode"] != before["inode"], 60)
    found: dict[str, Any] = rank.ask("arena")
    return found


def fill(rank: Rank, daemon: Daemon, first: int, count: int) -> dict[str, Any]:
    """Have `count` MiB in flight at once, by a daemon that stands still meanwhile."""
    assert rank.ask("flush")
    daemon.send(signal.SIGSTOP)
    rank.ask(f"capture {first} {first + count} {MIB}")
    assert rank.ask("counters")["in_flight"] == count
    until(lambda: rank.ask("arena")["there"] >= 2 * count * MIB)  # ahead of the use
    daemon.send(signal.SIGCONT)
    assert rank.ask("flush")
    found: dict[str, Any] = rank.ask("arena")
    return found


def test_a_job_holds_twice_what_it_has_in_flight_and_little_more(rank: Rank, daemon: Daemon) -> None:
    for first, in_flight in ((0, 1), (1, 20), (21, 100)):
        found = fill(rank, daemon, first, in_flight)
        bound = 2 * in_flight * MIB + SLACK_NBYTES
        assert found["nbytes"] > ARENA_NBYTES  # with the journal
        assert found["resident"] <= found["there"] <= bound < ARENA_NBYTES
    rank.leave()
    assert captured(daemon.store / "run.zarr") == [*range(121), FIRST]


@pytest.mark.slow
def test_a_long_quiet_gives_back_what_it_did_not_need(rank: Rank, daemon: Daemon) -> None:
    before = fill(rank, daemon, 0, 120)
    assert before["there"] >= 240 * MIB
    rank.ask("quiet 0.2")
    after = wait_for_fresh(rank, before)
    assert after["resident"] <= after["there"] <= SLACK_NBYTES
    until(lambda: mapped_arenas(daemon) == [after["inode"]])  # nobody keeps the old one
    assert rank.ask("fork") == 0  # a child has neither

    rank.ask(f"capture 120 180 {MIB}")
    assert rank.ask("flush")
    rank.leave()
    [session] = live_stats(daemon.endpoint)["sessions"]
    assert_balanced(session)
    assert (session["offered"], session["committed"]) == (181, 181)
    assert captured(daemon.store / "run.zarr") == [*range(180), FIRST]


@pytest.mark.slow
def test_captures_go_on_while_memory_is_given_back_again_and_again(rank: Rank, daemon: Daemon) -> None:
    rank.ask("quiet 0.05")
    for turn in range(3):
        before = rank.ask("arena")["inode"]
        fill(rank, daemon, 60 * turn, 60)
        until(lambda before=before: _trickled(rank)["inode"] != before, 60)
    assert rank.ask("flush")
    total = rank.ask("counters")
    rank.leave()
    [session] = live_stats(daemon.endpoint)["sessions"]
    assert_balanced(session)
    assert session["offered"] == session["committed"] == total["committed"] > 180
    assert len(captured(daemon.store / "run.zarr")) == total["committed"]


_next = iter(range(FIRST + 1, 10 * FIRST))


def _trickled(rank: Rank) -> dict[str, Any]:
    """The arena after another small capture, which is settled: while something is in flight, no memory goes."""
    number = next(_next)
    rank.ask(f"capture {number} {number + 1} 8192")
    assert rank.ask("flush")
    found: dict[str, Any] = rank.ask("arena")
    return found


def test_a_rank_that_dies_before_the_daemon_knows_its_new_memory_is_counted_exactly(
    rank: Rank, daemon: Daemon
) -> None:
    """HELLO waits in the socket of a daemon that stands still; nothing of the new memory was heard of."""
    before = fill(rank, daemon, 0, 80)
    daemon.send(signal.SIGSTOP)
    rank.ask("quiet 0.05")
    wait_for_fresh(rank, before)
    rank.ask(f"capture 80 87 {MIB}")
    assert rank.ask("counters") == {"offered": 88, "committed": 81, "in_flight": 7, "dropped": {}}
    rank.kill()
    daemon.send(signal.SIGCONT)

    def row() -> Any:
        [session] = live_stats(daemon.endpoint)["sessions"]
        return at_rest(session) and session["offered"] == 88 and session

    session = until(row, 60)
    assert_balanced(session)
    assert session["committed"] == 81 + 7 - session["dropped"].get("rank_died", 0)
    daemon.stop()
    assert len(captured(daemon.store / "run.zarr")) == session["committed"]
