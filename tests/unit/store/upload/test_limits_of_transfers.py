"""The limits of a transfer: bandwidth, memory, and the request to stop. Clocks are the tests' own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from capd.store.upload.local_files import FileVersion, KnownFiles
from capd.store.upload.sending.figures import UploadFigures
from capd.store.upload.sending.halt import Halt, UploadStopped
from capd.store.upload.sending.pace import Bandwidth, TransferMemory, no_limit


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_bytes_wait_for_those_before_them_and_a_pause_saves_up_nothing() -> None:
    clock = Clock()
    limit = Bandwidth(lambda: 1000.0, clock)

    assert [limit.reserve(500) for _ in range(3)] == [0.0, 0.5, 1.0]
    clock.now += 60
    assert [limit.reserve(500) for _ in range(2)] == [0.0, 0.5]
    assert Bandwidth(no_limit, clock).reserve(10**12) == 0.0


@pytest.mark.parametrize(
    ("rate", "piece"), [(None, 1 << 20), (1e9, 1 << 20), (400_000.0, 100_000), (10.0, 16 << 10)]
)
def test_a_piece_takes_a_quarter_of_a_second_at_most(rate: float | None, piece: int) -> None:
    assert Bandwidth(lambda: rate).piece_nbytes(1 << 20) == piece


def test_memory_is_held_by_as_many_as_fit_and_a_larger_object_goes_alone() -> None:
    room, halt, order = TransferMemory(100), Halt(), []
    inside = threading.Event()

    def wait() -> None:
        with room.held(1000, halt):
            order.append("large")

    with room.held(60, halt), room.held(40, halt):
        thread = threading.Thread(target=wait)
        thread.start()
        inside.wait(0.3)
        order.append("small")
    thread.join(10)

    assert order == ["small", "large"]


def test_a_request_to_stop_ends_waits_for_memory_and_leaves_a_moment_to_the_object_in_hand() -> None:
    room, halt = TransferMemory(10), Halt()
    with room.held(10, halt):
        halt.ask(30.0)
        with pytest.raises(UploadStopped), room.held(1, halt):
            pass
    with pytest.raises(UploadStopped):
        halt.check()
    halt.check_in_hand()
    halt.ask(0.0)
    with pytest.raises(UploadStopped):
        halt.check_in_hand()
    limit = Bandwidth(lambda: 1.0)
    limit.reserve(1000)
    with pytest.raises(UploadStopped):
        limit.take(1, halt)


def test_figures_count_what_waits_and_since_when() -> None:
    clock = Clock()
    figures = UploadFigures(clock)
    figures.waits("a", 300, 40.0)
    figures.waits("b", 500, 70.0)
    figures.wrote("a", 100, is_shard=True)
    figures.wrote("a", 7, is_shard=False)
    figures.failed("full")
    figures.failed("no such reason")
    found = figures.read()

    assert (found.objects, found.nbytes, found.backlog_nbytes, found.oldest_s) == (2, 107, 700, 60.0)
    assert (found.failures["full"], found.failures["other"], found.failures["unreachable"]) == (1, 1, 0)
    figures.settled("a")
    assert (figures.read().backlog_nbytes, figures.read().oldest_s) == (500, 30.0)
    figures.settled("b")
    assert (figures.read().backlog_nbytes, figures.read().oldest_s) == (0, 0.0)


def test_checksums_are_known_for_one_version_of_a_file_and_a_damaged_cache_is_empty(tmp_path: Path) -> None:
    (tmp_path / "upload").mkdir()
    known = KnownFiles(tmp_path)
    version = FileVersion(10, 20, 30)
    known.note("a/data", version, 7)
    known.note("b/data", version, 8)
    known.keep({"a/data"})
    known.save()
    again = KnownFiles(tmp_path)

    assert again.crc32c("a/data", version) == 7
    assert again.crc32c("a/data", version._replace(inode=31)) is None
    assert again.crc32c("b/data", version) is None
    cache = tmp_path / "upload" / "files.msgpack"
    assert cache.stat().st_mode & 0o777 == 0o600
    cache.write_bytes(b"\xc1 damaged")
    assert KnownFiles(tmp_path).crc32c("a/data", version) is None
