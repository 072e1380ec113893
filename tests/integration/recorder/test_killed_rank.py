"""A rank that is killed at a random moment of its training: the last iterations of all ranks are kept, and counted."""

from __future__ import annotations

import random

import pytest

from tests.integration.recorder.told_ranks import Recording, assert_exact
from tests.kit.daemon import wait_for

K = 4
# X, W and Y of a layer are one hook's lines.
BETWEEN = 3
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.fault) for seed in range(1, 8))]


def step_of(recording: Recording, rank: int) -> int:
    return int(recording.ranks[rank].ask("step"))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_killed_at_a_random_moment_leaves_the_last_iterations_of_all(
    recording: Recording, seed: int
) -> None:
    moment = random.Random(seed)
    daemon = recording.serve("", iterations=K)
    killed, other = recording.start_ranks(joint=False)
    for rank in (killed, other):
        assert rank.ask("on") == "on"
    step = moment.randrange(K, 40)
    wait_for(lambda: step_of(recording, 0) >= step, "the step of the death")
    # Up to some steps later, at any line.
    wait_for(lambda: moment.random() < 0.05, "the moment of the death")
    killed.process.kill()

    [keep] = wait_for(lambda: daemon.run_stats("run")["window"]["keeps"], "the keep")
    assert keep["reason"].startswith("rank 0 died")
    assert (keep["first"], keep["last"]) == (max(0, keep["iteration"] - K + 1), keep["iteration"] + K)
    kept = range(keep["first"], keep["last"] + 1)
    # The other one trains on.
    wait_for(lambda: step_of(recording, 1) > keep["last"] + 2 * K, "the other rank goes on")
    other.tell("leave")
    assert other.process.wait(60) == 0
    wait_for(lambda: not daemon.run_stats("run")["in_flight"], "the rest leaves")
    stats = daemon.run_stats("run")
    assert_exact(stats)
    rows = {row["rank"]: row for row in stats["sessions"]}
    assert daemon.stop() == 0

    found = [recording.kept(number) for number in range(2)]
    assert [rows[number]["committed"] for number in range(2)] == [found[0].total(), found[1].total()]
    # Of the other one all of it, bit for bit and once.
    assert recording.iterations(1) == list(kept)
    assert found[1] == recording.captured(1, kept)
    assert rows[1]["dropped"].keys() <= {"expired"}
    # Of the killed one what had reached the daemon: bit for bit and once, without what never left its arena.
    whole = recording.captured(0, kept)
    last = max(row[0] for row in whole)
    assert abs(keep["iteration"] - last) <= 1
    # It may have died between a capture and the line of the job's own hook about it, or the other way round.
    # The line may have been the first one of its iteration.
    unknown, missing = found[0] - whole, whole - found[0]
    assert {row[0] for row in unknown} in (set(), {last}, {last + 1})
    assert unknown.total() <= BETWEEN
    assert rows[0]["dropped"].keys() <= {"expired", "rank_died"}
    assert missing.total() <= rows[0]["dropped"].get("rank_died", 0) + BETWEEN
