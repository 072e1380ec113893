"""A storm: a rule fires at each step, and the job asks for a keep at each step. Nothing is stored twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.recorder.told_ranks import TENSORS, Recording, assert_exact
from tests.kit.daemon import DaemonProcess, wait_for
from tests.kit.processes import anonymous_nbytes

K = 4
EACH_STEP = (
    '[[trigger]]\nname = "each"\nmetric = "absmax"\nabove = 0\naction = "keep"\ncooldown = 0\n'
    "max_per_day = 1000000\n"
)
MIB = 1 << 20


def keeps_file(recording: Recording) -> Path:
    return recording.run / ".capd" / "node=n" / "window" / "keeps.jsonl"


def end(recording: Recording, daemon: DaemonProcess) -> dict[str, object]:
    recording.leave()
    wait_for(lambda: not daemon.run_stats("run")["in_flight"], "the rest leaves")
    stats = daemon.run_stats("run")
    assert_exact(stats)
    assert daemon.stop() == 0
    return stats


@pytest.mark.parametrize("last", [80, pytest.param(600, marks=pytest.mark.fault)])
def test_a_storm_stores_each_record_once_in_bounded_memory(recording: Recording, last: int) -> None:
    daemon = recording.serve(EACH_STEP, iterations=K, bytes='"16MiB"', memory='"8MiB"')
    recording.start_ranks()
    recording.tell("keeps")
    assert [rank.hear() for rank in recording.ranks] == ["asked", "asked"]
    recording.train_to(last // 2)
    before = anonymous_nbytes(daemon.process.pid)
    recording.train_to(last)
    assert anonymous_nbytes(daemon.process.pid) - before < 32 * MIB
    window = daemon.run_stats("run")["window"]
    assert window["held_bytes"] <= 16 * MIB
    assert len(window["keeps"]) <= 16
    stats = end(recording, daemon)
    # A rule may be so late that the first iterations of its keep are gone; what is kept is whole, and there once.
    asked = [json.loads(line) for line in keeps_file(recording).read_text().splitlines()]
    kept = recording.iterations(0)
    recording.assert_kept(kept)
    assert set(kept) <= {number for keep in asked for number in range(keep["first"], keep["last"] + 1)}
    assert len(kept) > last // 4
    assert stats["committed"] == 2 * TENSORS * len(kept)
    assert stats["dropped"].keys() <= {"expired"}
    assert {reason.split(" at ")[0] for reason, _ in recording.reasons(0)} <= {"each", "storm"}


def test_a_rule_that_fires_at_each_step_keeps_no_more_often_than_it_may_in_a_day(
    recording: Recording,
) -> None:
    daemon = recording.serve(EACH_STEP.replace("1000000", "1") + f"post = {K}\nfor = 9\n", iterations=K)
    recording.start_ranks()
    recording.train_to(8)
    alert = recording.an_alert()
    [keep] = wait_for(lambda: daemon.run_stats("run")["window"]["keeps"], "the keep")
    recording.train_to(5 * K)
    end(recording, daemon)
    assert keep["iteration"] == alert.iteration
    recording.assert_kept(range(keep["first"], keep["last"] + 1))
