"""How often the uploads of a daemon look at its runs."""

from __future__ import annotations

import pytest

from capd.server.uploads.uploads import INTERVAL_S, pause_after


@pytest.mark.parametrize(
    ("cpu_s", "pause_s"), [(0.0, INTERVAL_S), (0.1, INTERVAL_S), (1.0, 20.0), (2.0, 40.0), (30.0, 60.0)]
)
def test_looks_take_a_twentieth_of_a_core_at_most_and_come_each_minute_at_least(
    cpu_s: float, pause_s: float
) -> None:
    assert pause_after(cpu_s) == pause_s
