"""The time to stop, under schedulers that kill."""

from __future__ import annotations

import pytest

from capd.config import DaemonSettings
from capd.server.service.kill_time import shutdown_time


@pytest.mark.parametrize(
    ("variable", "words"),
    [("SLURM_JOB_ID", "KillWait"), ("KUBERNETES_SERVICE_HOST", "terminationGracePeriodSeconds")],
)
def test_under_a_scheduler_the_default_is_below_its_kill_time_and_the_log_says_so(
    variable: str, words: str
) -> None:
    seconds, line = shutdown_time(DaemonSettings(), {variable: "7"})

    assert seconds == 20
    assert line is not None
    assert words in line
    assert "CAPD_SHUTDOWN_TIMEOUT_S" in line
    assert "\n" not in line


@pytest.mark.parametrize("given", [5.0, 20.0, 30.0, 120.0])
def test_a_time_that_somebody_set_holds_everywhere(given: float) -> None:
    assert shutdown_time(DaemonSettings(shutdown_timeout_s=given), {"SLURM_JOB_ID": "7"}) == (given, None)


def test_elsewhere_the_default_holds() -> None:
    assert shutdown_time(DaemonSettings(), {}) == (30.0, None)
