"""The ledger of what was let go: it comes before the accounts, and what it cannot take stays held."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from capd.server.recorder.let_go import LetGoLedger
from capd.store.format.ranges import RangeSet
from capd_client.protocol.counter_page import DropReason
from tests.unit.server.recorder.desk import Desk

CLIENT = b"c" * 16


def ranges_of(path: Path) -> dict[DropReason, list[tuple[int, int]]]:
    return {reason: found.ranges() for reason, found in LetGoLedger(path).of(CLIENT).items()}


def test_a_line_torn_at_any_byte_counts_no_record_that_was_not_let_go(tmp_path: Path) -> None:
    path = tmp_path / "let-go.txt"
    ledger = LetGoLedger(path)
    ledger.add(DropReason.EXPIRED, {CLIENT: RangeSet([(1, 5)])})
    whole = path.stat().st_size
    ledger.add(DropReason.EXPIRED, {CLIENT: RangeSet([(100, 200)])})
    content = path.read_bytes()
    for end in range(whole, len(content) + 1):
        path.write_bytes(content[:end])
        expected = [(1, 5), (100, 200)] if end == len(content) else [(1, 5)]
        assert ranges_of(path) == {DropReason.EXPIRED: expected}


def test_a_write_that_fails_leaves_nothing_in_the_file_or_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "let-go.txt"
    ledger = LetGoLedger(path)
    ledger.add(DropReason.EXPIRED, {CLIENT: RangeSet([(1, 5)])})
    before = path.read_bytes()
    pwritev = os.pwritev

    def half(fd: int, views: list[memoryview], offset: int) -> int:
        if len(views[0]) < 10:
            raise OSError(28, "No space left on device")
        return pwritev(fd, [views[0][: len(views[0]) // 2]], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", half)
        with pytest.raises(OSError, match="No space"):
            ledger.add(DropReason.EXPIRED, {CLIENT: RangeSet([(6, 9)])})

    assert path.read_bytes() == before
    assert ledger.of(CLIENT)[DropReason.EXPIRED].ranges() == [(1, 5)]
    ledger.add(DropReason.EXPIRED, {CLIENT: RangeSet([(6, 9)])})
    assert ranges_of(path) == {DropReason.EXPIRED: [(1, 9)]}


def test_a_long_file_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "let-go.txt"
    ledger = LetGoLedger(path)
    for sequence in range(9000):
        ledger.add(DropReason.EXPIRED, {CLIENT: RangeSet([(sequence, sequence)])})

    assert path.read_bytes().count(b"\n") < 5000
    assert ranges_of(path) == {DropReason.EXPIRED: [(0, 8999)]}


def fault(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let the ledger fail while the first element is true."""
    failing, append = [True], LetGoLedger._append

    def fail(self: LetGoLedger, payload: bytes) -> None:
        if failing[0]:
            raise OSError(28, "No space left on device")
        append(self, payload)

    monkeypatch.setattr(LetGoLedger, "_append", fail)
    return failing


def test_what_the_ledger_cannot_take_stays_held_and_is_counted_once_also_by_the_next_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    for _ in range(3):
        desk.put(0)
    desk.look(9)
    failing = fault(monkeypatch)
    for _ in range(3):
        desk.turn()

    assert (desk.held, len(desk.files())) == ([0], 1)
    assert desk.rank().session.let_go_counts == {}
    assert len([one for one in caplog.messages if "nothing is let go while" in one]) == 1
    desk.assert_exact()

    desk.start()
    assert desk.held == [0]
    desk.assert_exact()
    desk.look(9)
    failing[0] = False
    desk.turn()
    assert (desk.held, desk.files()) == ([], [])
    assert desk.rank().session.let_go_counts == {DropReason.EXPIRED: 3}

    desk.start()
    assert desk.rank().session.let_go_counts == {DropReason.EXPIRED: 3}
    desk.assert_exact()


def test_a_record_without_room_is_refused_by_the_full_disk_while_the_ledger_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path)
    desk.put(0, nbytes=1 << 19)
    fault(monkeypatch)
    outcome = desk.put(1, nbytes=1 << 19)

    assert isinstance(outcome, tuple)
    assert outcome[0] is DropReason.DISK_FULL
    assert desk.held == [0]
    desk.assert_exact()


def test_a_refusal_of_the_store_is_in_the_ledger_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path)
    desk.put(0)
    assert desk.keep(0) == ""
    failing = fault(monkeypatch)
    desk.turn()
    desk.lanes.refuse(DropReason.QUOTA)
    desk.turn()
    assert desk.rank().session.let_go_counts == {}
    assert desk.held == [0]

    failing[0] = False
    desk.turn()
    desk.turn()
    assert desk.rank().session.let_go_counts == {DropReason.QUOTA: 1}
    assert (desk.held, desk.files()) == ([], [])
    desk.start()
    assert desk.rank().session.let_go_counts == {DropReason.QUOTA: 1}


def test_no_file_is_touched_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, iterations=2)
    touched: list[str] = []
    for name in ("open", "pwritev", "pread", "preadv", "unlink", "rmdir", "mkdir", "rename"):
        monkeypatch.setattr(os, name, watched(desk, touched, name, getattr(os, name)))
    for iteration in range(6):
        desk.put(iteration)
        desk.look(iteration)
        desk.turn()
    desk.put(6, nbytes=1 << 19)
    desk.put(7, nbytes=1 << 19)
    assert desk.keep(7) == ""
    desk.turn()
    desk.lanes.commit()
    desk.turn()

    assert desk.kept == [7]
    assert {"open", "pwritev", "preadv", "unlink"} <= set(touched)


def watched(desk: Desk, touched: list[str], name: str, call: object) -> object:
    def checked(*args: object, **kwargs: object) -> object:
        touched.append(name)
        assert not desk.recorder._lock.locked(), name
        return call(*args, **kwargs)  # type: ignore[operator]

    return checked


def test_a_ledger_of_any_size_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "let-go.txt"
    with path.open("wb") as file:
        # Without blocks on the disk. Steps whose scalars lie between the records need a line each.
        file.truncate(300 << 20)
        file.seek(0, os.SEEK_END)
        file.write(f"\n{CLIENT.hex()} expired 1 5\n".encode())
    assert ranges_of(path) == {DropReason.EXPIRED: [(1, 5)]}
    assert path.stat().st_size < 100
