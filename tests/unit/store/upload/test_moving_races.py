"""Shards that are moved while others read or change them: never zeros, and never a step back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zarr
from zarr.abc.store import RangeByteRequest

from capd.store.scan.survey import moved_shards, shard_files
from capd.store.upload.moving import ShardMover, UploadedPart
from capd.store.upload.node_upload import NodeUpload
from capd.store.upload.sending.transfer import UploadTools
from tests.kit.store.moving import AT_ONCE, LARGE, address_of, moved, uploaded, written
from tests.kit.store.reading import assert_capd_reads


class _MovesBeforeChunks(zarr.storage.LocalStore):
    """Files whose shards are moved after a reader has read an index, and before it reads the first chunk."""

    part: UploadedPart | None = None

    async def get(self, key, prototype, byte_range=None):
        if isinstance(byte_range, RangeByteRequest) and self.part is not None:
            mover, part, self.part = ShardMover(AT_ONCE), self.part, None
            mover.move([part])
            assert mover.shards
        return await super().get(key, prototype, byte_range)


def test_a_plain_reader_between_index_and_chunk_refuses_the_stub(tmp_path: Path) -> None:
    """A shard that is moved between two reads of one record is never taken for zeros; the next try raises, too."""
    writer = written(tmp_path / "store")
    store = _MovesBeforeChunks(writer.run / LARGE / "data", read_only=True)
    store.part = uploaded(writer.run, address_of(tmp_path / "remote"))
    array = zarr.open_array(store, mode="r")
    for _ in range(2):
        with pytest.raises(ValueError):
            array[0]
    assert store.part is None


def test_a_copy_that_writes_holes_keeps_stubs(tmp_path: Path) -> None:
    """Such stubs take the space of their shards: they are read, and never uploaded or moved again."""
    writer = written(tmp_path / "store")
    place = address_of(tmp_path / "remote")
    moved(writer.run, place)
    for file in shard_files(writer.run / LARGE).values():
        payload = file.read_bytes()
        file.unlink()
        file.write_bytes(payload)
    assert_capd_reads(writer.run, writer.held)
    assert len(moved_shards(writer.run, LARGE)) == 4
    with NodeUpload(writer.run, "n0", place, UploadTools.make()) as upload:
        assert upload.round().is_complete
        part = upload.uploaded()
    assert part is not None
    mover = ShardMover(AT_ONCE)
    mover.move([part])
    assert (mover.shards, mover.refused) == (0, 0)
    assert_capd_reads(writer.run, writer.held)


def test_a_shard_that_cannot_be_read_does_not_keep_the_others(tmp_path: Path, caplog) -> None:
    """A symbolic link takes the place of the oldest file after it was found: one warning, and the rest goes."""
    writer = written(tmp_path / "store")
    part = uploaded(writer.run, address_of(tmp_path / "remote"))
    file = shard_files(writer.run / LARGE)[0]
    os.utime(file, (0, 0))
    kept = file.with_name("kept")

    def swap() -> bool:
        if not kept.exists():
            file.rename(kept)
            file.symlink_to(kept)
        return False

    mover = ShardMover(AT_ONCE, is_stopping=swap)
    mover.move([part])
    assert mover.refused == 1
    assert "cannot be read" in caplog.text
    assert sorted(moved_shards(writer.run, LARGE)) == [1, 2, 3]
