"""Settings of the flight recorder: its memory, and the place that a node has for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from capd.errors import ConfigError
from capd.store.keeps.held_files import SHARED_MEMORY
from capd.window.place import check_place, memory_limit, place_problem
from capd.window.settings import WindowSettings

MIB = 1 << 20


@pytest.mark.parametrize(
    ("asked", "node", "free", "limit"),
    [
        (None, 1000 * MIB, 1000 * MIB, 50 * MIB),
        (None, 1000 * MIB, 60 * MIB, 30 * MIB),
        (None, 10**6 * MIB, 10**6 * MIB, 400 * MIB),
        (7 * MIB, 1000 * MIB, 1000 * MIB, 7 * MIB),
        (0, 1000 * MIB, 1000 * MIB, 0),
        (None, 1000 * MIB, 0, 0),
    ],
)
def test_memory_is_a_share_within_bytes_and_within_what_is_free(
    asked: int | None, node: int, free: int, limit: int
) -> None:
    settings = WindowSettings(iterations=3, nbytes=400 * MIB, memory_nbytes=asked)

    assert settings.memory_within(node, free) == limit


def test_the_memory_of_this_node_is_at_most_half_of_what_is_free() -> None:
    found = os.statvfs(SHARED_MEMORY)

    limit = memory_limit(WindowSettings(iterations=3, nbytes=1 << 60, memory_nbytes=1 << 60))

    assert 0 < limit <= found.f_blocks * found.f_frsize // 2


def test_a_place_with_room_has_no_problem(tmp_path: Path) -> None:
    settings = WindowSettings(iterations=3, nbytes=MIB, directory=tmp_path / "spool" / "deep")

    assert place_problem(settings, tmp_path / "runs", 0) == ""
    assert list(tmp_path.iterdir()) == []


def test_bytes_beyond_the_disk_are_refused_with_its_size(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^\[window\] bytes: .* more than the .* of the file system /.*; lower"
    ):
        check_place(WindowSettings(iterations=3, nbytes=1 << 60), tmp_path / "runs", 0)


def test_the_part_in_memory_needs_no_disk(tmp_path: Path) -> None:
    total = os.statvfs(SHARED_MEMORY)
    memory = total.f_blocks * total.f_frsize

    assert place_problem(WindowSettings(iterations=3, nbytes=MIB, memory_nbytes=MIB), tmp_path, 1.0) == ""
    problem = place_problem(
        WindowSettings(iterations=3, nbytes=2 * memory, memory_nbytes=memory + MIB), tmp_path, 0
    )
    assert problem.startswith("[window] memory: ")
    assert "/dev/shm" in problem


def test_room_beside_keep_free_counts_what_an_earlier_daemon_left(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    settings = WindowSettings(iterations=3, nbytes=512 * MIB)
    keep_free = found.f_bavail * found.f_frsize - 768 * MIB

    assert place_problem(settings, tmp_path, keep_free) == ""
    refused = place_problem(settings, tmp_path, keep_free + 512 * MIB)
    assert refused.startswith("[window] bytes: 536.9 MB on disk are more than the ")
    assert "beside keep_free; lower bytes" in refused

    spool = tmp_path / "a.zarr" / ".capd" / "node=n" / "window"
    spool.mkdir(parents=True)
    with open(spool / "a0-i0-000000.held", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 512 * MIB)

    assert place_problem(settings, tmp_path, keep_free) == ""


@pytest.mark.parametrize(
    ("directory", "said"),
    [(Path("/proc/self/spool"), "cannot be written to"), (Path("/dev/null/spool"), "is no directory")],
)
def test_a_directory_that_takes_no_file_is_refused(tmp_path: Path, directory: Path, said: str) -> None:
    problem = place_problem(WindowSettings(iterations=3, nbytes=MIB, directory=directory), tmp_path, 0)

    assert problem.startswith("[window] directory: ")
    assert said in problem
    assert "choose another one" in problem


def test_other_files_in_the_directory_make_no_room(tmp_path: Path) -> None:
    place = tmp_path / "nvme"
    spool = place / "window-0" / "run" / "a0-i0-000000.held"
    spool.parent.mkdir(parents=True)
    found = os.statvfs(place)
    keep_free = found.f_bavail * found.f_frsize - 768 * MIB
    settings = WindowSettings(iterations=3, nbytes=512 * MIB, directory=place)
    with open(place / "dataset.bin", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 512 * MIB)
    assert "beside keep_free" in place_problem(settings, tmp_path, keep_free)

    (place / "dataset.bin").rename(spool)
    assert place_problem(settings, tmp_path, keep_free) == ""
