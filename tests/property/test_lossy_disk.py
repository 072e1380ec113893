"""The disk that forgets: what was synced stays, what was not may go, and a rename is never half done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from tests.property.kit.lossy_disk import LossyDisk

Read = Callable[[Path], object]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LossyDisk]:
    root = tmp_path / "life"
    (root / "a").mkdir(parents=True)
    (root / "b").mkdir()
    (root / "a" / "old").write_bytes(b"o" * 2000)
    found = LossyDisk(root, "catalog")
    yield found
    found.close()


def sync(disk: LossyDisk, path: str) -> None:
    fd = os.open(disk.root / path, os.O_RDONLY)
    try:
        disk.sync(fd)
    finally:
        os.close(fd)


def outcomes(disk: LossyDisk, tmp_path: Path, read: Read) -> set[object]:
    """What `read` finds behind a hundred power losses."""
    tmp_path.mkdir(exist_ok=True)
    found = set()
    for seed in range(100):
        target = tmp_path / f"image-{seed}"
        disk.after_power_loss(Random(seed), target).close()
        found.add(read(target))
    return found


def names(root: Path) -> object:
    return frozenset(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_what_was_not_synced_may_be_lost_in_part_or_whole(disk: LossyDisk, tmp_path: Path) -> None:
    with (disk.root / "a" / "old").open("ab") as file:
        file.write(b"n" * 2000)
    found = outcomes(disk, tmp_path, lambda root: (root / "a" / "old").read_bytes())
    assert {b"o" * 2000, b"o" * 2000 + b"n" * 2000} < found
    assert all(isinstance(content, bytes) and content[:2000] == b"o" * 2000 for content in found)
    assert any(0 in content for content in found if isinstance(content, bytes))  # a sector that never came


def test_a_new_file_needs_its_own_sync_and_that_of_its_directory(disk: LossyDisk, tmp_path: Path) -> None:
    (disk.root / "a" / "new").write_bytes(b"n" * 700)

    def read(root: Path) -> object:
        new = root / "a" / "new"
        return new.read_bytes() if new.exists() else None

    sync(disk, "a/new")
    assert outcomes(disk, tmp_path / "1", read) == {None, b"n" * 700}
    sync(disk, "a")
    assert outcomes(disk, tmp_path / "2", read) == {b"n" * 700}


def test_a_rename_is_done_or_not_done(disk: LossyDisk, tmp_path: Path) -> None:
    os.rename(disk.root / "a" / "old", disk.root / "b" / "moved")
    both = {frozenset({"a/old"}), frozenset({"b/moved"})}
    assert outcomes(disk, tmp_path / "1", names) == both
    sync(disk, "a")
    assert outcomes(disk, tmp_path / "2", names) == {frozenset({"b/moved"})}


def test_what_a_failed_sync_threw_away_no_later_sync_brings_back(disk: LossyDisk, tmp_path: Path) -> None:
    path = disk.root / "a" / "old"
    path.write_bytes(b"x" * 2000)
    with path.open("rb") as file:
        disk.fail_sync(file.fileno(), evict=False)
    sync(disk, "a/old")
    assert path.read_bytes() == b"x" * 2000  # the page cache still has it
    assert outcomes(disk, tmp_path, lambda root: (root / "a" / "old").read_bytes()) == {b"o" * 2000}


def test_a_kill_loses_nothing_and_makes_nothing_durable(disk: LossyDisk, tmp_path: Path) -> None:
    (disk.root / "a" / "new").write_bytes(b"n")
    os.unlink(disk.root / "a" / "old")
    killed = disk.after_kill(tmp_path / "killed")
    assert names(killed.root) == {"a/new"}
    after = outcomes(killed, tmp_path, names)
    killed.close()
    assert frozenset({"a/old"}) in after
    assert frozenset({"a/new"}) in after
