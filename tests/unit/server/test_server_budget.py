"""Disk budget, CPU limits: checked before use, and cheap to ask."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from capd.server import budget
from capd.server.budget import DiskBudget, default_max_disk, encode_threads, usable_cpus


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(budget, "time", made)
    return made


def test_a_record_within_the_limits_may_be_written(tmp_path: Path) -> None:
    assert DiskBudget(tmp_path, 1 << 30, 0.0).refusal(1 << 20) is None
    assert DiskBudget(tmp_path, None, 0).refusal(1 << 20) is None


def test_max_disk_counts_what_is_stored_and_what_was_just_admitted(tmp_path: Path, clock: Clock) -> None:
    limit = DiskBudget(tmp_path, 1000, 0)
    stored = [0]
    limit.stored = lambda: stored[0]

    assert limit.refusal(600) is None
    assert "--max-disk" in str(limit.refusal(600))
    assert limit.refusal(400) is None

    stored[0], clock.now = 300, clock.now + 1.1  # compression was better than raw
    assert limit.refusal(700) is None
    assert limit.refusal(1) is not None


def test_keep_free_is_a_share_or_bytes(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    assert "--keep-free" in str(DiskBudget(tmp_path, None, free + (1 << 30)).refusal(1))
    assert DiskBudget(tmp_path, None, max(0, free - (1 << 30))).refusal(1) is None
    assert DiskBudget(tmp_path, None, 1.0).refusal(1) is not None
    assert DiskBudget(tmp_path, None, 0.25).keep_free_nbytes() == int(total * 0.25)


def test_space_is_looked_up_at_most_once_a_second(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = os.statvfs
    monkeypatch.setattr(budget.os, "statvfs", lambda path: asked.append(path) or real(path))
    limit = DiskBudget(tmp_path, None, 0)

    for _ in range(1000):
        limit.refusal(1)
    assert len(asked) == 1
    clock.now += 1.1
    limit.refusal(1)
    assert len(asked) == 2


def test_a_file_system_that_does_not_answer_refuses(tmp_path: Path) -> None:
    assert "does not answer" in str(DiskBudget(tmp_path / "gone", None, 0).refusal(1))


def test_defaults_are_within_the_machine(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    assert 0 < default_max_disk(tmp_path) <= min(200 * 10**9, found.f_bavail * found.f_frsize)
    assert 0 < usable_cpus() <= len(os.sched_getaffinity(0))
    assert 1 <= encode_threads() <= 16


def test_a_cgroup_quota_cuts_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_CGROUP", tmp_path)
    monkeypatch.setattr(budget, "_cgroup_path", lambda controller: "job/step" if controller == "" else None)
    (tmp_path / "job" / "step").mkdir(parents=True)
    (tmp_path / "job" / "step" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "job" / "cpu.max").write_text("50000 100000\n")

    assert usable_cpus() == 0.5
    assert encode_threads() == 1
