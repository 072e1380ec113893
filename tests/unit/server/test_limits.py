"""Disk and inode budget, CPU limits: checked before use, and cheap to ask."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from capd.server import limits
from capd.server.limits import DiskBudget, encode_threads, usable_cpus
from capd_client.config.sizes import default_max_disk
from tests.kit.store.writing import Writer, key


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(limits, "time", made)
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
    monkeypatch.setattr(limits.os, "statvfs", lambda path: asked.append(path) or real(path))
    limit = DiskBudget(tmp_path, None, 0)

    for _ in range(1000):
        limit.refusal(1)
    assert len(asked) == 1
    clock.now += 1.1
    limit.refusal(1)
    assert len(asked) == 2


class Disk:
    """A file system whose figures the test sets."""

    def __init__(self, **figures: int) -> None:
        self.figures = {"free": 10**12, "inodes": 1_000_000, "free_inodes": 1_000_000, **figures}

    def __call__(self, path: Path) -> os.statvfs_result:
        f = self.figures
        return os.statvfs_result(
            (4096, 1, 10**12, f["free"], f["free"], f["inodes"], f["free_inodes"], f["free_inodes"], 0, 255)
        )


def on_disk(monkeypatch: pytest.MonkeyPatch, **figures: int) -> Disk:
    disk = Disk(**figures)
    monkeypatch.setattr(limits.os, "statvfs", disk)
    return disk


def admitted_series(limit: DiskBudget) -> int:
    """How many new series pass, one after the other."""
    count = 0
    while limit.refusal(1, new_series=1) is None:
        count += 1
    return count


def test_what_is_on_its_way_to_the_disk_counts_beyond_the_next_look(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = on_disk(monkeypatch, free=1000)
    limit = DiskBudget(tmp_path, None, 0)
    waiting = [0]
    limit.waiting = lambda: (waiting[0], 0)

    assert limit.refusal(900) is None
    waiting[0], clock.now = 900, clock.now + 1.1  # the disk does not show it yet
    assert limit.refusal(101) is not None
    waiting[0], clock.now = 0, clock.now + 1.1
    disk.figures["free"] = 400  # written, and smaller than it was raw
    assert limit.refusal(101) is None


def test_free_space_below_what_is_kept_refuses_even_an_empty_record(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = on_disk(monkeypatch, free=10**11 - 1)
    limit = DiskBudget(tmp_path, None, 0.1)

    assert "--keep-free" in str(limit.refusal(0))
    disk.figures["free"] += 10
    assert limit.refusal(0) is not None  # not looked at again yet
    clock.now += 1.1
    assert limit.refusal(9) is None


def test_where_nothing_is_free_the_disk_refuses_and_not_what_is_kept(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To keep less free would not help."""
    disk = on_disk(monkeypatch, free=500)
    limit = DiskBudget(tmp_path, None, 0.1)

    assert str(limit.refusal(499)).startswith("keep_free refuses a record of 499 B: ")
    assert str(limit.refusal(500)).startswith("the full disk refuses a record of 500 B: ")
    disk.figures |= {"free": 10**12, "inodes": 10_000, "free_inodes": 15}
    clock.now += 1.1
    assert str(limit.refusal(1, new_series=1)).startswith(
        "the full disk refuses a new series: 15 inodes free"
    )


def test_inodes_are_kept_free_like_bytes_and_records_pass_again_when_they_return(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = on_disk(monkeypatch, inodes=10_000, free_inodes=999)
    limit = DiskBudget(tmp_path, None, 0.1)

    message = str(limit.refusal(1))
    assert "999 inodes free" in message
    assert "delete files" in message
    disk.figures["free_inodes"], clock.now = 1_100, clock.now + 1.1
    assert limit.refusal(1) is None
    assert admitted_series(limit) == 100 // 16
    assert limit.refusal(1) is None  # a series that exists takes none


def test_the_inode_reserve_is_some_hundreds_and_none_where_nothing_is_kept(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk(monkeypatch, inodes=2_000, free_inodes=512 + 40)

    assert admitted_series(DiskBudget(tmp_path, None, 0.01)) == 2
    assert admitted_series(DiskBudget(tmp_path, None, 10**9)) == 2
    assert admitted_series(DiskBudget(tmp_path, None, 0)) == (512 + 40) // 16


def test_series_that_wait_for_their_seal_hold_the_inodes_it_needs(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk(monkeypatch, inodes=2_000, free_inodes=512 + 160)
    limit = DiskBudget(tmp_path, None, 0.1)
    limit.unsealed = lambda: 10  # 80 inodes
    limit.waiting = lambda: (0, 3)  # 48 inodes

    assert admitted_series(limit) == 2


def test_a_file_system_without_inodes_has_no_such_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk(monkeypatch, inodes=0, free_inodes=0)

    assert DiskBudget(tmp_path, None, 0.1).refusal(1, new_series=1) is None


def test_a_store_that_is_gone_or_was_made_anew_refuses(tmp_path: Path, clock: Clock) -> None:
    root = tmp_path / "store"
    root.mkdir()
    limit = DiskBudget(root, None, 0)
    assert limit.refusal(1) is None

    root.rename(tmp_path / "elsewhere")
    clock.now += 1.1
    assert "does not answer: No such file" in str(limit.refusal(1))
    root.mkdir()
    clock.now += 1.1
    assert "restart `capd serve`" in str(limit.refusal(1))
    root.rmdir()
    (tmp_path / "elsewhere").rename(root)
    clock.now += 1.1
    assert limit.refusal(1) is None


@pytest.mark.parametrize("nbytes", [64, 512 << 10], ids=["small", "large"])
def test_a_record_that_its_rank_has_heard_of_counts_as_stored_alone(tmp_path: Path, nbytes: int) -> None:
    """A look at the disk between the answer and the rank's next record must not find it on its way as well."""
    writer = Writer(tmp_path)
    waiting: list[tuple[int, int]] = []
    writer.outcomes.committed = lambda _: waiting.append(writer.pipeline.waiting())  # type: ignore[method-assign]
    writer.put(key(), "uint8", np.zeros(nbytes, "u1"))
    writer.flush()
    writer.close()

    assert waiting == [(0, 0)]


def test_defaults_are_within_the_machine(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    assert 0 < default_max_disk(tmp_path) <= min(200 * 10**9, found.f_bavail * found.f_frsize)
    assert 0 < usable_cpus() <= len(os.sched_getaffinity(0))
    assert 1 <= encode_threads() <= 16


def test_a_cgroup_quota_cuts_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_CGROUP", tmp_path)
    monkeypatch.setattr(limits, "_cgroup_path", lambda controller: "job/step" if controller == "" else None)
    (tmp_path / "job" / "step").mkdir(parents=True)
    (tmp_path / "job" / "step" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "job" / "cpu.max").write_text("50000 100000\n")

    assert usable_cpus() == 0.5
    assert encode_threads() == 1
