"""The figures of the kernel are those of this process, and its start does not move."""

from __future__ import annotations

import time

import pytest

from capd.server.metrics import host


def test_a_step_of_the_clock_does_not_look_like_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    before, now = host.process(), time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)

    assert host.process().started_s == before.started_s
    assert before.started_s < now
