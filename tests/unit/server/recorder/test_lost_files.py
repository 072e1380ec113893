"""Files of the spool that others delete or that cannot be read, and the memory of what has left."""

from __future__ import annotations

import errno
import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread, current_thread

import pytest

from capd.server.recorder import departures
from capd.server.recorder.departures import Departures
from capd.server.recorder.held_run import HeldRun
from capd.server.recorder.segment import HeldFile
from capd.server.recorder.spool import HeldFiles
from capd_client.protocol.counter_page import DropReason
from tests.unit.server.recorder.desk import MIB, Desk, Seen, overwrite


def test_records_of_a_deleted_file_count_as_store_errors_and_stop_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    for iteration in range(3):
        desk.put(iteration)
        desk.put(iteration, number=1)
    desk.start()
    [gone] = desk.run.rglob("a0-i1-*.held")
    gone.unlink()

    assert desk.keep(2) == ""
    desk.turn()
    desk.lanes.commit()
    desk.turn()
    desk.turn()
    assert desk.kept == [0, 0, 2, 2]
    for rank in desk.ranks.values():
        assert rank.session.let_go_counts == {DropReason.STORE_ERROR: 1}
    assert "2 held records of iteration 1 are damaged or deleted in the spool" in caplog.text
    assert (desk.held, desk.files(), desk.recorder.disk_nbytes) == ([], [], 0)
    desk.assert_exact()
    # The next daemon knows it, too.
    desk.start()
    desk.assert_exact()


def test_a_head_that_is_damaged_while_the_daemon_runs_hides_no_other_record(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for _ in range(4):
        desk.put(0)
    [path] = desk.files()
    frame = path.stat().st_size // 4
    overwrite(path, frame + 4, b"????")
    overwrite(path, 3 * frame + 4, b"????")
    assert desk.keep(0) == ""
    desk.turn()
    desk.lanes.commit()
    desk.turn()
    desk.turn()

    assert (desk.kept, desk.held, desk.files()) == ([0, 0], [], [])
    assert desk.rank().session.let_go_counts == {DropReason.STORE_ERROR: 2}
    desk.assert_exact()


def test_a_refused_record_of_an_iteration_with_a_damaged_one_counts_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.put(0)
    desk.put(0)
    [path] = desk.files()
    overwrite(path, 4, b"????")
    assert desk.keep(0) == ""
    desk.turn()
    desk.lanes.refuse(DropReason.QUOTA)
    desk.turn()
    desk.turn()
    assert desk.rank().session.let_go_counts == {DropReason.QUOTA: 1, DropReason.STORE_ERROR: 1}
    desk.assert_exact()


def test_many_small_kept_records_leave_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "_IN_FLIGHT_NBYTES", 64 << 10)
    desk = Desk(tmp_path)
    for _ in range(50):
        desk.put(0, nbytes=1)
    assert desk.keep(0) == ""
    desk.turn()
    # Each takes some memory beside its only byte.
    assert len(desk.lanes.jobs) < 40
    desk.lanes.commit()
    desk.turn()
    desk.lanes.commit()
    assert len(desk.kept) == 50


def test_files_that_are_read_do_not_stay_open(tmp_path: Path) -> None:
    desk = Desk(tmp_path, iterations=500)
    for iteration in range(200):
        desk.put(iteration)
    desk.start()
    before = len(os.listdir("/proc/self/fd"))
    assert desk.keep(199, post=0) == ""
    desk.turn()
    assert len(desk.lanes.jobs) == 200
    assert len(os.listdir("/proc/self/fd")) < before + 20


def test_a_run_that_fails_stops_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path)
    desk.put(0)
    (desk.root / "a.zarr/.capd/node=n").mkdir(parents=True)
    desk.recorder.open_run("a", lambda _: [])
    assert desk.keep(0) == ""
    runs = desk.recorder._runs
    monkeypatch.setattr(runs["a"].keeps, "write", lambda _: 1 / 0)
    # The one that fails comes first.
    desk.recorder._runs = dict(sorted(runs.items()))

    desk.turn()
    desk.turn()
    desk.lanes.commit()
    assert desk.kept == [0]
    assert len([one for one in caplog.messages if "run a: failed, retrying" in one]) == 1


def test_a_left_file_that_cannot_be_read_does_not_keep_its_run_from_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    desk.put(0)
    desk.put(1)
    survey = HeldFile.survey

    def broken(self: HeldFile) -> Iterator[object]:
        if "-i0-" in self.path.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return survey(self)

    with monkeypatch.context() as patch:
        patch.setattr(HeldFile, "survey", broken)
        desk.start()
    assert desk.held == [1]
    assert any("cannot be read" in one for one in caplog.messages)


def test_the_bytes_of_a_stored_record_are_free_at_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.put(0)
    assert desk.keep(0) == ""
    desk.turn()
    stored = weakref.ref(desk.lanes.jobs[0].sink)
    gc.disable()
    try:
        desk.lanes.commit()
        desk.lanes.stored.clear()
        assert stored() is None
    finally:
        gc.enable()


def test_what_was_let_go_takes_no_room_while_it_waits_for_the_rules(tmp_path: Path) -> None:
    desk = Desk(tmp_path, judges=Seen())
    desk.put(0)
    [path] = desk.files()
    [job] = desk.recorder._feed._waiting  # type: ignore[union-attr]
    desk.put(9)
    desk.look(10)
    desk.turn()

    assert [one.name for one in desk.files() if one == path] == []
    open_files = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    assert f"{path} (deleted)" not in open_files
    with pytest.raises(FileNotFoundError):
        job.read()


def test_a_record_waits_for_the_room_of_an_iteration_that_is_being_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path, iterations=2)
    for iteration in range(4):
        assert desk.put(iteration, nbytes=MIB // 4 - 4096) is True
    desk.look(2)
    outcomes: list[object] = []
    putting = Thread(target=lambda: outcomes.append(desk.put(4, nbytes=MIB // 4 - 4096)))
    looks_for_room = Event()
    remove, let_go = HeldFiles.remove, Departures.let_go

    def noted(self: Departures, run: HeldRun) -> OSError | None:
        if current_thread() is putting:
            looks_for_room.set()
        return let_go(self, run)

    def slow(self: HeldFiles, segment: HeldFile) -> None:
        if not putting.is_alive():
            putting.start()
            assert looks_for_room.wait(30)
        remove(self, segment)

    monkeypatch.setattr(Departures, "let_go", noted)
    monkeypatch.setattr(HeldFiles, "remove", slow)
    desk.turn()
    putting.join(30)
    assert (outcomes, desk.held) == ([True], [1, 2, 3, 4])
    desk.assert_exact()


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_statistics_of_one_iteration_leave_at_a_time_when_bytes_are_exceeded(tmp_path: Path) -> None:
    desk = Desk(tmp_path, iterations=100, statistics=True)
    desk.look(0)
    for iteration in range(4):
        assert desk.put(iteration, nbytes=MIB // 4 - 4096) is True
    # These find no room until the first iteration is stored.
    assert [desk.put(4, nbytes=MIB // 4 - 4096) for _ in range(3)] == [False] * 3
    desk.turn(0)
    desk.lanes.commit()
    desk.turn(0)

    assert desk.held == [1, 2, 3]
    assert desk.put(4, nbytes=MIB // 4 - 4096) is True
    desk.assert_exact()


def test_a_record_without_room_beside_records_that_are_being_stored_is_told_so(tmp_path: Path) -> None:
    desk = Desk(tmp_path, post=0)
    desk.look(0)
    for _ in range(4):
        assert desk.put(0, nbytes=MIB // 4 - 4096) is True
    assert desk.keep(0) == ""

    refused = (DropReason.EXPIRED, "the 1.0 MB of [window] bytes are full of records that are being stored")
    assert desk.put(1, nbytes=MIB // 4 - 4096) == refused
    desk.assert_exact()


def test_iterations_of_any_number_outlive_the_daemon(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.put(2**63 - 1)
    desk.start()
    assert desk.held == [2**63 - 1]


def test_a_left_file_of_another_name_is_none(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    (desk.run / ".capd/node=n/window").mkdir(exist_ok=True)
    (desk.run / f".capd/node=n/window/a0-i{10**20}-000000.held").touch()
    assert HeldFiles(desk.settings, desk.root, "n", lambda _: None).left_segments("run") == []
