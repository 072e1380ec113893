"""How often the uploads of a daemon look at its runs, and how much they send while ranks are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from capd.config import DaemonSettings
from capd.server.uploads import uploads as module
from capd.server.uploads.uploads import INTERVAL_S, live_rate, pause_after


@pytest.mark.parametrize(
    ("cpu_s", "pause_s"), [(0.0, INTERVAL_S), (0.1, INTERVAL_S), (1.0, 20.0), (2.0, 40.0), (30.0, 60.0)]
)
def test_looks_take_a_twentieth_of_a_core_at_most_and_come_each_minute_at_least(
    cpu_s: float, pause_s: float
) -> None:
    assert pause_after(cpu_s) == pause_s


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ({}, 37.5e6),
        ({"upload_bandwidth": "200MB"}, 37.5e6),
        ({"upload_bandwidth": "1MB"}, 1e6),
        ({"upload_live_bandwidth": "5GB"}, 5e9),
        ({"upload_live_bandwidth": "5GB", "upload_bandwidth": "1GB"}, 1e9),
    ],
)
def test_beside_ranks_uploads_take_a_sixteenth_of_the_cpus_unless_asked(
    settings: dict[str, str], rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "usable_cpus", lambda: 1.5)
    assert live_rate(DaemonSettings.model_validate({"store": Path("s"), **settings})) == rate
