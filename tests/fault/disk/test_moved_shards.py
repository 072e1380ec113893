"""`delete_local = "at:N%"` on a small file system: the oldest shards go, until there is room, and no further."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from capd.store.scan.survey import moved_shards, shard_files
from capd.store.upload.move_policy import MovePolicy, used_fraction
from capd.store.upload.moving import ShardMover
from capd.store.verify.run import verify_run
from tests.fault.kit.file_systems import mounted_tmpfs
from tests.kit.store.moving import LARGE, SMALL, address_of, uploaded, written
from tests.kit.store.reading import assert_capd_reads

pytestmark = pytest.mark.fault


def fill(place: Path) -> None:
    """Write until the disk refuses."""
    with place.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def test_the_oldest_shards_go_until_there_is_room(tmp_path: Path) -> None:
    """Below the mark nothing goes. Above it, shards go by age across the runs, until the mark less five percent."""
    with mounted_tmpfs(tmp_path / "disk", "size=32m") as disk:
        writers = [written(disk / "store", 9, run_id=name) for name in ("one", "two")]
        parts = [uploaded(writer.run, address_of(tmp_path / "remote")) for writer in writers]
        files = [
            file for w in writers for path in (LARGE, SMALL) for file in shard_files(w.run / path).values()
        ]
        # By turns of both runs.
        for age, file in enumerate(sorted(files, key=lambda file: (file.parts[-3], str(file)))):
            os.utime(file, (0, 1_000_000_000 + age))
        used, nbytes = used_fraction(disk)
        mover = ShardMover(MovePolicy(at=used + 0.02))
        mover.move(parts)
        assert mover.shards == 0
        told: list[int] = []
        mark = used - 0.01
        mover = ShardMover(MovePolicy(at=mark), on_moved=lambda _, info: told.append(info.st_mtime_ns))
        for part in parts:
            assert mover.waits(part.run, part.node)
        mover.move(parts)
        left, _ = used_fraction(disk)
        largest = max(file.stat().st_size for file in files) / nbytes
        assert mark - 0.05 - largest <= left <= mark - 0.05
        assert told == sorted(told)
        assert (
            0
            < mover.shards
            < sum(len(shard_files(w.run / path)) - 1 for w in writers for path in (LARGE, SMALL))
        )
        assert not mover.waits(parts[0].run, parts[0].node)
        for writer in writers:
            assert verify_run(writer.run).ok
            assert_capd_reads(writer.run, writer.held)


def test_a_full_file_system_moves_nothing_by_halves(tmp_path: Path) -> None:
    """Without room for a stub the shard stays whole; with some it goes."""
    with mounted_tmpfs(tmp_path / "disk", "size=32m") as disk:
        writer = written(disk / "store", 9)
        part = uploaded(writer.run, address_of(tmp_path / "remote"))
        filler = disk / "filler"
        with pytest.raises(OSError, match="No space left"):
            fill(filler)
        mover = ShardMover(MovePolicy(at=0.9))
        with pytest.raises(OSError, match="No space left"):
            mover.move([part])
        assert not moved_shards(writer.run, LARGE)
        filler.write_bytes(bytes(filler.stat().st_size - (64 << 10)))
        mover = ShardMover(MovePolicy(at=0.9))
        mover.move([part])
        assert mover.shards
        assert_capd_reads(writer.run, writer.held)
