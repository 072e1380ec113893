"""What is held: bounded bytes, memory before disk, full disks by their name, and what the rules could not see."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from capd.server.recorder import judging
from capd.server.recorder.segment import HeldBytes, HeldFile
from capd.store.disk.scratch import Scratch
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.messages import Define
from capd_client.protocol.scalars import scalar_key
from tests.unit.server.recorder.desk import MIB, Desk, Seen, payload

QUARTER = MIB // 4


def fill(desk: Desk, iterations: range, nbytes: int = QUARTER - 4096) -> None:
    for iteration in iterations:
        assert desk.put(iteration, nbytes=nbytes) is True


def test_the_oldest_iteration_leaves_whole_when_bytes_are_exceeded(tmp_path: Path) -> None:
    desk = Desk(tmp_path, iterations=100)
    desk.look(0)
    desk.put(0)
    fill(desk, range(7))

    assert desk.held == [3, 4, 5, 6]
    assert desk.rank().session.let_go_counts == {DropReason.EXPIRED: 4}
    assert desk.recorder.disk_nbytes <= MIB
    desk.assert_exact()


def test_what_exceeds_bytes_within_one_iteration_is_refused_as_expired_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    desk.look(0)
    fill(desk, range(3))
    outcomes = [desk.put(9, nbytes=QUARTER) for _ in range(7)]

    refused = [one for one in outcomes if one is not True]
    assert len(refused) == 4
    assert refused[0] == (DropReason.EXPIRED, "iteration 9 needs more than the 1.0 MB of [window] bytes")
    assert desk.held == [9]
    assert desk.recorder.stats("run").expired == 3 + 4
    assert len([one for one in caplog.messages if "iteration 9 alone needs more" in one]) == 1
    desk.assert_exact()


def test_a_spool_grows_from_memory_to_disk_within_a_run(tmp_path: Path, shared_memory: Path) -> None:
    desk = Desk(tmp_path, memory_nbytes=QUARTER)
    desk.look(0)
    desk.put(0, nbytes=QUARTER // 2)
    desk.put(0, nbytes=QUARTER // 2)
    desk.put(1, nbytes=QUARTER // 4)

    stats = desk.recorder.stats("run")
    assert 0 < stats.memory_bytes <= QUARTER < stats.held_bytes == stats.memory_bytes + stats.disk_bytes
    [in_memory, also] = sorted(shared_memory.rglob("*.held"))
    assert (in_memory.parent.name, also.parent.name) == ("run", "run")
    assert [path.parent for path in desk.run.rglob("*.held")] == [desk.run / ".capd/node=n/window"]
    for path in (in_memory, *desk.run.rglob("*.held")):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert desk.keep(1) == ""
    desk.turn()
    desk.lanes.commit()
    assert desk.kept == [0, 0, 1]


def test_memory_that_others_have_filled_is_no_reason_to_refuse(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = HeldFile.append

    def full(self: HeldFile, *args: object) -> HeldBytes:
        if self.in_memory:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return append(self, *args)

    monkeypatch.setattr(HeldFile, "append", full)
    desk = Desk(tmp_path, memory_nbytes=QUARTER)

    assert [desk.put(0), desk.put(0)] == [True, True]
    assert desk.recorder.stats("run").memory_bytes == 0
    assert not list(shared_memory.rglob("*.held"))


def test_a_full_disk_is_called_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path)
    desk.look(0)
    desk.why_full = "keep_free refuses a record"
    assert desk.put(0) == (DropReason.DISK_FULL, "keep_free refuses a record")

    desk.why_full = None

    def full(*_: object) -> HeldBytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(HeldFile, "append", full)
    outcome = desk.put(0)
    assert isinstance(outcome, tuple)
    assert outcome[0] is DropReason.DISK_FULL
    assert (desk.held, desk.files()) == ([], [])
    assert desk.recorder.stats("run").expired == 0
    desk.assert_exact()


def test_a_kept_record_goes_on_where_the_spool_has_no_room(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.look(0)
    desk.put(0)
    assert desk.keep(0, post=2) == ""
    desk.why_full = "full"

    assert desk.put(1) is False
    desk.turn()
    desk.lanes.commit()
    assert desk.kept == [0, 1]


def test_a_kept_record_that_exceeds_bytes_is_stored_whole_and_counts_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path, statistics=True)
    desk.look(0)
    desk.put(0)
    assert desk.keep(0, post=2) == ""

    assert desk.put(1, nbytes=2 * MIB) is False
    desk.turn()
    desk.lanes.commit()
    assert desk.kept == [0, 1]
    assert desk.recorder.stats("run").expired == 0


def test_scalars_and_statistics_are_not_held(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    scalar = desk.job(0)
    scalar.define = Define(id=1, key=scalar_key("loss", 0), dtype="float64")
    assert desk.take(scalar) is False
    assert desk.put(0, payload=False) is False
    assert desk.held == []


def test_a_record_in_parts_is_copied_from_its_file_and_kept_bit_for_bit(tmp_path: Path) -> None:
    desk = Desk(tmp_path, nbytes=8 * MIB)
    size = 2 * MIB + 24
    job = desk.job(0, nbytes=size)
    file = Scratch(tmp_path, size)
    file.append(memoryview(payload(job.sequence, size)))

    assert desk.take(replace(job, data=file)) is True
    file.close()
    assert desk.keep(0) == ""
    desk.turn()
    desk.lanes.commit()
    assert desk.kept == [0]


def test_an_iteration_that_leaves_is_stored_as_statistics_if_that_is_asked_for(tmp_path: Path) -> None:
    desk = Desk(tmp_path, statistics=True)
    for iteration in range(5):
        desk.put(iteration)
        desk.look(iteration)
    desk.turn()
    assert [job.descriptor.payload for job in desk.lanes.jobs] == [False] * 2
    desk.lanes.commit()
    desk.turn()

    assert (desk.kept, desk.held) == ([0, 1], [2, 3, 4])
    assert desk.recorder.stats("run").expired == 0
    desk.end()
    assert desk.kept == list(range(5))
    assert desk.files() == []
    desk.assert_exact()


@pytest.mark.parametrize("statistics", [False, True])
def test_a_daemon_that_stops_after_its_ranks_have_left_leaves_nothing_in_the_spool(
    tmp_path: Path, statistics: bool
) -> None:
    desk = Desk(tmp_path, statistics=statistics)
    submit = desk.lanes.submit
    desk.lanes.submit = lambda *jobs: (submit(*jobs), desk.lanes.commit())[0]  # type: ignore[method-assign]
    desk.put(0)
    desk.put(1)
    desk.look(1)
    desk.look(None)
    desk.recorder.start()
    desk.recorder.stop(time.monotonic() + 30)
    assert desk.kept == ([0, 1] if statistics else [])
    assert desk.rank().session.let_go_counts == ({} if statistics else {DropReason.EXPIRED: 2})
    assert desk.files() == []
    desk.assert_exact()


def test_a_kept_record_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    read_into = HeldFile.read_into

    def counted(self: HeldFile, view: memoryview, at: int) -> None:
        read.append(len(view))
        read_into(self, view, at)

    monkeypatch.setattr(HeldFile, "read_into", counted)
    desk = Desk(tmp_path)
    desk.put(0, nbytes=4096)
    assert desk.keep(0) == ""
    desk.turn()
    desk.lanes.commit()

    assert desk.kept == [0]
    assert sum(read) == 4096


def test_records_beyond_the_queue_of_the_rules_are_judged_when_kept_and_else_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "MOST_WAITING", 2)
    seen = Seen()
    desk = Desk(tmp_path, judges=seen)
    for _ in range(3):
        desk.put(0)
    desk.put(9)
    desk.look(10)
    desk.turn()
    assert (desk.held, seen.left_out) == ([9], 1)

    assert desk.keep(9) == ""
    desk.turn()
    assert [job.judged for job in desk.lanes.jobs] == [False]


def test_records_that_the_rules_saw_are_not_judged_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path, judges=Seen())
    desk.put(0)
    assert desk.keep(0) == ""
    desk.turn()
    assert [job.judged for job in desk.lanes.jobs] == [True]
