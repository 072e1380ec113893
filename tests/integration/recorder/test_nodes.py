"""Two daemons on one store, each with one rank: what one keeps the other keeps, too."""

from __future__ import annotations

import signal

import pytest

from tests.integration.recorder.told_ranks import NAN, Recording, assert_exact
from tests.kit.daemon import DaemonProcess, wait_for

K = 4
STEP, RANK = 7, 1


def end(recording: Recording, *served: DaemonProcess) -> None:
    recording.leave()
    for daemon in served:
        wait_for(lambda daemon=daemon: not daemon.run_stats("run")["in_flight"], "the rest leaves")  # type: ignore[misc]
        assert_exact(daemon.run_stats("run"))
        assert daemon.stop() == 0


def keeps(daemon: DaemonProcess) -> list[tuple[str, int, int, int, str]]:
    return [
        (keep["reason"], keep["iteration"], keep["first"], keep["last"], keep["node"])
        for keep in daemon.run_stats("run")["window"]["keeps"]
    ]


def test_a_nan_of_a_rank_of_one_node_is_kept_on_both(recording: Recording) -> None:
    one, two = recording.serve("", node="a", iterations=K), recording.serve(NAN, node="b", iterations=K)
    recording.start_ranks(bad=(STEP, RANK), nodes="ab")
    recording.train_to(STEP + 2)
    wait_for(lambda: keeps(one) and keeps(two), "both nodes keep")
    assert keeps(one) == keeps(two) == [("nan", STEP, STEP - K + 1, STEP + K, "b")]
    recording.train_to(STEP + 3 * K)
    end(recording, one, two)
    recording.assert_kept(range(STEP - K + 1, STEP + K + 1))
    assert recording.reasons(0) == recording.reasons(1) == {("nan", STEP)}


@pytest.mark.fault
def test_a_node_whose_daemon_is_killed_hears_of_the_keep_after_its_start(recording: Recording) -> None:
    one, two = recording.serve("", node="a", iterations=K), recording.serve(NAN, node="b", iterations=K)
    recording.start_ranks(bad=(STEP, RANK), nodes="ab")
    recording.train_to(STEP - 1)
    one.stop(signal.SIGKILL)
    recording.tell("to", STEP)
    assert recording.ranks[RANK].hear() is True
    wait_for(lambda: keeps(two), "the other node keeps")
    one = recording.serve("", node="a", iterations=K)
    assert recording.ranks[0].hear() is True
    wait_for(lambda: keeps(one), "this node keeps")
    recording.train_to(STEP + 3 * K)
    end(recording, one, two)
    recording.assert_kept(range(STEP - K + 1, STEP + K + 1))
