"""A NaN at step k of one rank of two: the alert is soon and right, and the steps around k are stored of both ranks.

Also where the daemon is killed after the NaN, where the whole job dies at k, and where the daemon dies before the job.
"""

from __future__ import annotations

import signal

import pytest

from tests.integration.recorder.told_ranks import Recording, assert_exact
from tests.kit.daemon import DaemonProcess, wait_for

K = 4
STEP, RANK = 7, 1
BEFORE = range(STEP - K + 1, STEP + 1)
AROUND = range(STEP - K + 1, STEP + K)
POST = K - 1


def assert_alert(recording: Recording) -> None:
    alert = recording.an_alert()
    assert (alert.rule, alert.rank, alert.iteration) == ("nan", RANK, STEP)
    assert f"/rank{RANK}/" in alert.series
    for row in recording.alerts():
        assert (row.rank, row.iteration) == (RANK, STEP)


def assert_soon(recording: Recording) -> None:
    """The alert came within 3 s of the capture of the tensor with the NaN."""
    captured_ns = max(
        record.time_ns
        for series in recording.series(RANK)
        for record in series.records
        if record.iteration == STEP and record.stats.nan
    )
    assert 0 < recording.an_alert().time_ns - captured_ns < 3e9


def end(recording: Recording, daemon: DaemonProcess) -> None:
    """The ranks leave, and the daemon ends: all of it is counted."""
    recording.leave()
    wait_for(lambda: not daemon.run_stats("run")["in_flight"], "the rest leaves")
    assert_exact(daemon.run_stats("run"))
    assert daemon.stop() == 0


def test_the_steps_around_a_nan_are_kept_of_both_ranks(recording: Recording) -> None:
    daemon = recording.serve(post=POST)
    recording.start_ranks(bad=(STEP, RANK))
    recording.train_to(STEP + POST + 6)
    assert_alert(recording)
    end(recording, daemon)
    recording.assert_kept(AROUND)
    assert_soon(recording)
    assert recording.reasons(0) == recording.reasons(1) == {("nan", STEP)}


@pytest.mark.parametrize(
    "until",
    [STEP, pytest.param(STEP + 1, marks=pytest.mark.fault), pytest.param(STEP + 2, marks=pytest.mark.fault)],
)
def test_also_if_the_daemon_is_killed_after_the_nan(recording: Recording, until: int) -> None:
    daemon = recording.serve(post=POST)
    recording.start_ranks(bad=(STEP, RANK))
    recording.train_to(until)
    # At once: perhaps no rule has seen the NaN yet.
    daemon.stop(signal.SIGKILL)
    daemon = recording.serve(post=POST)
    recording.train_to(STEP + POST + 6)
    assert_alert(recording)
    end(recording, daemon)
    recording.assert_kept(AROUND)
    assert recording.reasons(0) == recording.reasons(1) == {("nan", STEP)}


@pytest.mark.parametrize("how", ["kill", pytest.param("exit", marks=pytest.mark.fault)])
def test_also_if_the_whole_job_dies_at_that_step(recording: Recording, how: str) -> None:
    daemon = recording.serve(post=POST)
    recording.start_ranks(bad=(STEP, RANK))
    recording.train_to(STEP)
    recording.tell(how)
    assert_alert(recording)
    wait_for(lambda: not daemon.run_stats("run")["in_flight"], "the rest leaves")
    assert_exact(daemon.run_stats("run"))
    assert daemon.stop() == 0
    recording.assert_kept(BEFORE)


def test_an_exception_at_that_step_keeps_as_a_death_does(recording: Recording) -> None:
    daemon = recording.serve("", post=POST)
    recording.start_ranks()
    recording.train_to(STEP)
    recording.tell("raise")
    wait_for(lambda: not daemon.run_stats("run")["in_flight"], "the rest leaves")
    assert_exact(daemon.run_stats("run"))
    assert daemon.stop() == 0
    recording.assert_kept(BEFORE)
    assert recording.reasons(0) | recording.reasons(1) == {("FloatingPointError", STEP)}


def test_also_if_the_daemon_dies_first_and_then_the_job(recording: Recording) -> None:
    daemon = recording.serve(post=POST)
    recording.start_ranks(bad=(STEP, RANK))
    recording.train_to(STEP)
    daemon.stop(signal.SIGKILL)
    recording.tell("kill")
    for rank in recording.ranks:
        rank.process.wait(30)
    daemon = recording.serve(post=POST)
    wait_for(lambda: recording.alerts(), "the alert")
    wait_for(lambda: not daemon.run_stats("run")["in_flight"], "the rest leaves")
    assert_exact(daemon.run_stats("run"))
    assert_alert(recording)
    assert daemon.stop() == 0
    recording.assert_kept(BEFORE)
