"""What an earlier daemon left: it is held again, whatever became of the files, and each record counts once."""

from __future__ import annotations

from pathlib import Path

import pytest

from capd.server.recorder import left_records
from capd.server.recorder.held_record import HEAD_NBYTES
from capd_client.protocol.counter_page import DropReason
from tests.unit.server.recorder.desk import Desk, Seen, overwrite


def test_a_damaged_record_is_a_store_error_and_those_after_it_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    for _ in range(4):
        desk.put(0)
    [path] = desk.files()
    second = path.stat().st_size // 4
    overwrite(path, second + 4, b"????")
    desk.start()

    assert "1 held records are damaged in the spool; 1 of them count as store_error" in caplog.text
    assert desk.rank().session.let_go_counts == {DropReason.STORE_ERROR: 1}
    desk.assert_exact()
    assert desk.keep(0) == ""
    desk.turn()
    desk.lanes.commit()
    assert desk.kept == [0, 0, 0]
    # It counts once, however often a daemon starts.
    desk.start()
    assert desk.rank().session.let_go_counts == {DropReason.STORE_ERROR: 1}
    desk.assert_exact()


def test_damage_in_what_was_settled_counts_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.put(0)
    desk.put(0)
    assert desk.keep(0) == ""
    desk.turn()
    desk.lanes.commit(1)
    overwrite(desk.files()[0], HEAD_NBYTES + 3, b"????")
    desk.start()
    assert desk.rank().session.let_go_counts == {}
    desk.assert_exact()


def test_damaged_data_is_a_store_error_when_it_is_kept(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.put(0)
    desk.put(0)
    [path] = desk.files()
    overwrite(path, path.stat().st_size - 1, b"?")
    assert desk.keep(0) == ""
    desk.turn()
    desk.lanes.commit()
    desk.turn()
    assert desk.kept == [0]
    assert desk.rank().session.let_go_counts == {DropReason.STORE_ERROR: 1}
    assert desk.files() == []
    desk.assert_exact()


def test_a_file_that_was_settled_before_its_deletion_is_deleted(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.put(0)
    [path] = desk.files()
    content = path.read_bytes()
    desk.look(9)
    desk.turn()
    assert desk.files() == []
    path.write_bytes(content)
    desk.start()

    assert (desk.files(), desk.held) == ([], [])
    assert desk.rank().session.let_go_counts == {DropReason.EXPIRED: 1}


def test_a_rank_that_joins_again_while_its_kept_records_are_committed_counts_each_once(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)
    for _ in range(4):
        desk.put(0)
    assert desk.keep(0) == ""
    desk.turn()
    desk.start()
    desk.turn()
    desk.lanes.commit(2)
    asked = []
    committed = desk.lanes.committed
    desk.lanes.committed = lambda client: asked.append(client) or committed(client)  # type: ignore[method-assign,func-returns-value]
    desk.join(desk.rank())

    # The store is not asked: other threads change what it would say.
    assert asked == []
    desk.assert_exact()
    desk.lanes.commit()
    desk.assert_exact()
    assert list(desk.rank().session.done) == [1, 2, 3, 4]


def test_the_rules_see_what_is_left_as_far_as_they_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left_records, "MOST_WAITING", 2)
    desk = Desk(tmp_path, judges=Seen())
    for _ in range(3):
        desk.put(0)
    desk.start()
    assert desk.keep(0) == ""
    desk.turn()
    assert [job.judged for job in desk.lanes.jobs] == [True, True, False]


def test_the_memory_of_runs_that_were_removed_is_freed_at_the_start(
    tmp_path: Path, shared_memory: Path
) -> None:
    desk = Desk(tmp_path, memory_nbytes=1 << 20)
    desk.put(0)
    assert len(list(shared_memory.rglob("*.held"))) == 1
    desk.run.rename(tmp_path / "elsewhere")
    Desk.start(desk)
    assert not list(shared_memory.rglob("*.held"))


def test_no_empty_directory_stays_outside_of_the_runs(tmp_path: Path, shared_memory: Path) -> None:
    disk = tmp_path / "nvme"
    desk = Desk(tmp_path, memory_nbytes=1 << 18, directory=disk)
    desk.put(0, nbytes=1 << 17)
    desk.put(0, nbytes=1 << 19)
    assert [len(list(place.rglob("*.held"))) for place in (shared_memory, disk)] == [1, 1]
    desk.end()
    assert not [path for place in (shared_memory, disk) for path in place.rglob("run")]
    desk.recorder.start()
    desk.recorder.stop(0.0)
    assert not [path for place in (shared_memory, disk) for path in place.rglob("window-*")]
