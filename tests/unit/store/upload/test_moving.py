"""Uploaded shards leave the local disk only after they were verified, and never silently."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given
from hypothesis import strategies as st

from capd.errors import DamagedRecord, StoreError
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.disk import failpoints
from capd.store.disk.layout import node_directory
from capd.store.objects.address import parse_address
from capd.store.scan.moved_shard import MAX_STUB_NBYTES, MovedShard, encode_stub, moved_shard, read_stub
from capd.store.scan.survey import moved_shards, shard_files
from capd.store.upload.move_policy import MovePolicy, used_fraction
from capd.store.upload.moving import ShardMover
from capd.store.verify.run import verify_run
from tests.kit.store.moving import AT_ONCE, LARGE, SMALL, address_of, moved, uploaded, written

KEY = f"{LARGE}/data/c/0/0/0"
MOVED = MovedShard(parse_address("s3://bucket/prefix/run.zarr"), KEY, 123, 0x12345678)


def test_a_stub_says_where_its_shard_is() -> None:
    """It comes back as it was written, is small, and other bytes are no stub."""
    stub = encode_stub(MOVED)
    assert read_stub(stub, KEY) == MOVED
    assert len(stub) < 4096 <= MAX_STUB_NBYTES
    assert read_stub(stub + bytes(700), KEY) == MOVED
    assert read_stub(b"CAPF" + stub, KEY) is None
    assert str(MOVED.address) == f"s3://bucket/prefix/run.zarr/{KEY}"


@pytest.mark.parametrize(
    "change",
    [
        lambda stub: stub[:-1],
        lambda stub: stub + b"\n",
        lambda stub: stub.replace(b"bucket", b"bukcet"),
        lambda stub: stub[:17] + b" " * MAX_STUB_NBYTES + stub[17:],
    ],
)
def test_a_damaged_stub_is_damage(change) -> None:
    """One flipped, missing or further byte shows."""
    with pytest.raises(DamagedRecord, match="checksum"):
        read_stub(change(encode_stub(MOVED)), KEY)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"to": parse_address("s3://bucket/prefix")}, "no shard of a run"),
        ({"key": f"{LARGE}/data/c/1/0/0"}, "it is of"),
        ({"key": "../../../../../data/c/0"}, "it is of"),
        ({"key": f"{LARGE}/zarr.json"}, "no shard of a run"),
        ({"nbytes": -1}, "numbers"),
        ({"nbytes": 2**70}, "numbers|not valid"),
    ],
)
def test_a_stub_that_anybody_may_have_written_is_checked(fields, says: str) -> None:
    """Address, key and numbers are those of this shard, or the stub is refused."""
    forged = MovedShard(**{name: fields.get(name, getattr(MOVED, name)) for name in MovedShard.__slots__})
    with pytest.raises(DamagedRecord, match=says):
        read_stub(encode_stub(forged), KEY)


@given(st.binary(max_size=400), st.integers(0, 300))
def test_no_bytes_are_taken_for_a_stub_that_are_none(noise: bytes, at: int) -> None:
    """Whatever follows the first line, and whatever bytes change: the stub is as it was written, or refused."""
    stub = encode_stub(MOVED)
    changed = stub[:at] + noise + stub[at + len(noise) :]
    for payload in (stub[:17] + noise, changed, noise):
        with contextlib.suppress(StoreError):
            found = read_stub(payload, KEY)
            assert found is None or payload.rstrip(b"\0") == stub
            assert found is not None or not payload.startswith(stub[:17])


def test_plain_zarr_readers_refuse_a_stub(tmp_path: Path) -> None:
    """zarr-python and tensorstore raise for a moved shard; a missing one they would fill with zeros."""
    writer = written(tmp_path / "store")
    moved(writer.run, address_of(tmp_path / "remote"))
    for path in (LARGE, SMALL):
        data = writer.run / path / "data"
        gone = sorted(moved_shards(writer.run, path))
        per_shard = zarr.open_array(data, mode="r").shards[0]
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(data)}}
        store = tensorstore.open(spec).result()
        for shard in gone:
            for part in (np.s_[shard * per_shard], np.s_[shard * per_shard : (shard + 1) * per_shard]):
                with pytest.raises(ValueError):
                    zarr.open_array(data, mode="r")[part]
                with pytest.raises(ValueError):
                    store[part].read().result()
        # The shards that stay are read as before.
        rest = np.s_[(gone[-1] + 1) * per_shard :]
        assert zarr.open_array(data, mode="r")[rest].tobytes() == store[rest].read().result().tobytes()


@pytest.mark.parametrize("chunks", [1, 2, 1024])
def test_plain_zarr_readers_refuse_a_stub_of_any_size(tmp_path: Path, chunks: int) -> None:
    """Whether it is larger or smaller than the index that they expect: whole shards and single chunks raise."""
    codec = {"name": "gzip", "configuration": {"level": 1}}
    array = zarr.create_array(
        tmp_path, shape=(4 * chunks,), shards=(2 * chunks,), chunks=(2,), dtype="f4", compressors=[codec]
    )
    array[:] = 1
    file = tmp_path / "c" / "0"
    file.write_bytes(encode_stub(MOVED).ljust(file.stat().st_size, b"\0"))
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path)}}
    store = tensorstore.open(spec).result()
    for part in (np.s_[0], np.s_[: 2 * chunks], np.s_[:]):
        with pytest.raises(ValueError):
            zarr.open_array(tmp_path, mode="r")[part]
        with pytest.raises(ValueError):
            store[part].read().result()


def test_only_shards_that_no_record_can_join_are_moved(tmp_path: Path) -> None:
    """The last shard of each series stays, the others are stubs; nothing of them is lost, and the mover says so."""
    writer = written(tmp_path / "store")
    before = {path: sorted(shard_files(writer.run / path)) for path in (LARGE, SMALL)}
    sizes = {file: file.stat().st_size for path in before for file in shard_files(writer.run / path).values()}
    told: list[int] = []
    mover = ShardMover(AT_ONCE, on_moved=lambda run, info: told.append(info.st_size))
    part = uploaded(writer.run, address_of(tmp_path / "remote"))
    mover.move([part])
    for path, shards in before.items():
        assert len(shards) > 2
        assert sorted(moved_shards(writer.run, path)) == shards[:-1]
        for number, one in moved_shards(writer.run, path).items():
            file = shard_files(writer.run / path)[number]
            assert one.nbytes == sizes[file]
            assert file.stat().st_mode & 0o777 == 0o600
            # A hole, so that a reader that has read the index before finds no end of the file.
            assert file.stat().st_size == sizes[file]
            assert file.stat().st_blocks * 512 <= 8192
            assert one.address == part.bucket.address / file.relative_to(writer.run).as_posix()
    assert (mover.shards, mover.nbytes) == (len(told), sum(told))
    again = ShardMover(AT_ONCE)
    again.move([part])
    assert (again.shards, again.refused) == (0, 0)


def test_shards_wait_for_their_age(tmp_path: Path) -> None:
    """after: moves what is old enough, the oldest first; never moves nothing."""
    writer = written(tmp_path / "store")
    part = uploaded(writer.run, address_of(tmp_path / "remote"))
    file = shard_files(writer.run / LARGE)[0]
    os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 7200))
    for policy, count in ((MovePolicy(), 0), (MovePolicy(after_s=3600), 1)):
        mover = ShardMover(policy)
        mover.move([part])
        assert mover.shards == count
    assert sorted(moved_shards(writer.run, LARGE)) == [0]


def test_a_full_disk_lets_the_oldest_go(tmp_path: Path) -> None:
    """at: does nothing below its mark; above it, it begins with the oldest."""
    writer = written(tmp_path / "store")
    part = uploaded(writer.run, address_of(tmp_path / "remote"))
    used, _ = used_fraction(writer.run)
    order: list[int] = []
    files = [file for path in (LARGE, SMALL) for file in shard_files(writer.run / path).values()]
    for age, file in enumerate(reversed(files)):
        os.utime(file, (0, 1_000_000_000 + age))
    mover = ShardMover(MovePolicy(at=min(1.0, used + 0.2)))
    mover.move([part])
    assert not mover.shards
    mover = ShardMover(MovePolicy(at=used / 2), on_moved=lambda _, info: order.append(info.st_mtime_ns))
    mover.move([part])
    assert order == sorted(order)
    assert len(order) > 2


def _object(part, shard: int = 0) -> Path:
    return Path("/", part.bucket.address.key, LARGE, "data", "c", str(shard), "0", "0")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda place: place.unlink(), "is missing"),
        (lambda place: place.write_bytes(place.read_bytes()[:-1]), "bytes, but"),
        (lambda place: place.write_bytes(b"\0" + place.read_bytes()[1:]), "checksum that was uploaded"),
    ],
)
def test_a_shard_whose_object_is_wrong_stays(tmp_path: Path, caplog, spoil, says: str) -> None:
    """A missing, cut or corrupt object: one warning, the shard stays, and the others go."""
    writer = written(tmp_path / "store")
    part = uploaded(writer.run, address_of(tmp_path / "remote"))
    spoil(_object(part))
    mover = ShardMover(AT_ONCE)
    with caplog.at_level(logging.WARNING):
        mover.move([part])
        mover.move([part])
    assert [says in record.message for record in caplog.records] == [True]
    assert mover.refused == 1
    assert sorted(moved_shards(writer.run, LARGE))[0] == 1
    assert verify_run(writer.run).ok


def test_a_local_file_that_was_not_uploaded_stays(tmp_path: Path, caplog) -> None:
    """The local bytes are compared before they go: damage on this disk is found, not moved."""
    writer = written(tmp_path / "store")
    part = uploaded(writer.run, address_of(tmp_path / "remote"))
    file = shard_files(writer.run / LARGE)[0]
    payload = bytearray(file.read_bytes())
    payload[len(payload) // 2] ^= 1
    file.write_bytes(payload)
    mover = ShardMover(AT_ONCE)
    mover.move([part])
    assert mover.refused == 1
    assert "does not have the bytes that were uploaded" in caplog.text
    assert file.read_bytes() == payload


def test_verify_notes_moved_shards(tmp_path: Path) -> None:
    """They are no damage: one note counts them; a stub that contradicts the catalog is damage."""
    writer = written(tmp_path / "store")
    mover = moved(writer.run, address_of(tmp_path / "remote"))
    report = verify_run(writer.run)
    assert report.ok
    assert report.moved.total() == mover.shards
    assert [f"{mover.shards} shards of run.zarr are at file:///" in text for text in report.notes] == [True]
    file = shard_files(writer.run / LARGE)[0]
    stub = moved_shard(writer.run, file)
    assert stub is not None
    # The catalog also counts chunks that were written again, and that the shard lost when it was sealed.
    database = sqlite3.connect(node_directory(writer.run, "n0") / CATALOG_NAME)
    database.execute("UPDATE records SET stored_nbytes = stored_nbytes * 2")
    database.execute(
        "UPDATE series SET stored_bytes = (SELECT SUM(stored_nbytes) FROM records WHERE records.series = series.id)"
    )
    database.commit()
    database.close()
    assert not verify_run(writer.run).damaged
    shutil.copyfile(shard_files(writer.run / LARGE)[1], file)
    [damage] = verify_run(writer.run).damaged
    assert "it is of" in damage.what
    last = max(shard_files(writer.run / LARGE))
    key = shard_files(writer.run / LARGE)[last].relative_to(writer.run).as_posix()
    file.write_bytes(encode_stub(stub))
    shard_files(writer.run / LARGE)[last].write_bytes(
        encode_stub(MovedShard(stub.to, key, stub.nbytes, stub.crc32c))
    )
    assert any("records are published" in one.what for one in verify_run(writer.run).damaged)


def test_the_stub_of_a_newer_version_is_named(tmp_path: Path) -> None:
    """The message says what to do."""
    stub = encode_stub(MOVED).replace(b'"format":1', b'"format":2')
    from capd.store.format.codecs import crc32c

    body = stub[:-9]
    with pytest.raises(StoreError, match="upgrade capd"):
        read_stub(body + b"%08x\n" % crc32c(body), KEY)


_MOVE = """
import sys
from pathlib import Path
from tests.kit.store.moving import AT_ONCE, address_of, uploaded
from capd.store.upload.moving import ShardMover
ShardMover(AT_ONCE).move([uploaded(Path(sys.argv[1]), address_of(Path(sys.argv[2])))])
"""


@pytest.mark.parametrize("point", [name for name in failpoints.NAMES if name.startswith("move.")])
def test_a_kill_leaves_the_shard_or_the_stub(tmp_path: Path, point: str) -> None:
    """Killed at the second pass of each step: every shard is whole or a stub, and the next call moves the rest."""
    writer = written(tmp_path / "store")
    whole = {
        file: file.read_bytes() for path in (LARGE, SMALL) for file in shard_files(writer.run / path).values()
    }
    part = uploaded(writer.run, address_of(tmp_path / "remote"))
    done = subprocess.run(
        [sys.executable, "-c", _MOVE, str(writer.run), str(tmp_path / "remote")],
        env={**os.environ, "CAPD_FAILPOINTS": f"{point}=kill@2"},
        check=False,
    )
    assert done.returncode == -9
    for file, payload in whole.items():
        stub = moved_shard(writer.run, file)
        assert stub is not None or file.read_bytes() == payload
        assert stub is None or Path("/", part.bucket.address.key, stub.key).read_bytes() == payload
    report = verify_run(writer.run)
    assert report.ok
    assert not [text for text in report.notes if "not part of the run" in text]
    mover = ShardMover(AT_ONCE)
    mover.move([part])
    assert verify_run(writer.run).moved.total() == len(whole) - 2
    assert not list((writer.run / ".capd").rglob("moving-*"))
