"""Records whose shards were moved are read, copied, repaired and recovered as if they were here."""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import capd
from capd.errors import DamagedRecord, StoreError
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.objects.address import Address
from capd.store.repair.catalog import rebuild_catalog
from capd.store.scan.survey import moved_shards, shard_files
from capd.store.upload.moving import ShardMover
from capd.store.upload.node_upload import NodeUpload
from capd.store.upload.sending.transfer import UploadTools
from capd.store.verify.run import verify_run
from tests.kit.store.content import content_of, tables
from tests.kit.store.moving import AT_ONCE, LARGE, SMALL, address_of, moved, put_steps, written
from tests.kit.store.reading import assert_capd_reads
from tests.kit.store.writing import CLIENT, Writer


def upload(run: Path, to: Address) -> None:
    """Bring a run to an object store as a daemon does, and move its shards."""
    with NodeUpload(run, "n0", to, UploadTools.make()) as node:
        node.round()
        part = node.uploaded()
        assert part is not None
        ShardMover(AT_ONCE).move([part])


@pytest.fixture
def run(tmp_path: Path) -> Writer:
    """The writer of a run whose full shards were moved."""
    writer = written(tmp_path / "store")
    moved(writer.run, address_of(tmp_path / "remote"))
    return writer


def test_moved_records_are_read(run: Writer) -> None:
    """Whole records, parts of them, stacks and statistics: bit for bit, beside those that are here."""
    assert_capd_reads(run.run, run.held)
    store = capd.open(run.run)
    for path in (LARGE, SMALL):
        series = store[path]
        expected = next(held for (key, _), held in run.held.items() if key == series.key)
        assert (
            series.stack(slice(None), bits=True).tobytes()
            == np.stack([bits for _, bits in expected]).tobytes()
        )
        part = series.numpy(1, np.s_[3:40:2, 5])
        assert part.tobytes() == expected[1][1][3:40:2, 5].tobytes()


def test_a_store_that_is_open_goes_on_reading(tmp_path: Path) -> None:
    """Shards that are moved between two reads of one Store: the values stay."""
    writer = written(tmp_path / "store")
    store = capd.open(writer.run)
    series = store[SMALL]
    before = [series.numpy(number).tobytes() for number in range(len(series))]
    moved(writer.run, address_of(tmp_path / "remote"))
    assert [series.numpy(number).tobytes() for number in range(len(series))] == before
    assert [store[SMALL].numpy(number).tobytes() for number in range(len(series))] == before


def test_plain_arrays_say_where_they_are(run: Writer) -> None:
    """`Series.zarr` of a moved series names the address instead of a checksum."""
    with pytest.raises(StoreError, match=r"shards were moved to file:///.*run\.zarr"):
        capd.open(run.run)[LARGE].zarr()


def test_a_missing_object_is_damage(run: Writer, tmp_path: Path) -> None:
    """The message says where the record was moved to, and that it is gone."""
    gone = tmp_path / "remote" / "run.zarr" / LARGE / "data" / "c" / "0" / "0" / "0"
    gone.unlink()
    series = capd.open(run.run)[LARGE]
    with pytest.raises(DamagedRecord, match=r"#0 was moved to file:///.*but there is no such object"):
        series.numpy(0)
    assert series.numpy(len(series) - 1).any()


def test_a_corrupt_object_is_damage(run: Writer, tmp_path: Path) -> None:
    """A flipped byte of a chunk never becomes a value."""
    place = tmp_path / "remote" / "run.zarr" / LARGE / "data" / "c" / "0" / "0" / "0"
    payload = bytearray(place.read_bytes())
    for at in range(2000, len(payload) - 100, 5000):
        payload[at] ^= 1
    place.write_bytes(payload)
    with pytest.raises(DamagedRecord):
        capd.open(run.run)[LARGE].numpy(0)


def test_an_older_version_of_an_object_is_damage(tmp_path: Path) -> None:
    """A bucket that brings back what an object was before its shard was full never answers with zeros."""
    writer = written(tmp_path / "store", steps=1)
    old = shard_files(writer.run / SMALL)[0].read_bytes()
    again = Writer(writer.run.parent, shard_nbytes=1 << 20)
    again.held, again.sequence = writer.held, writer.sequence
    put_steps(again, 1, 9)
    again.close()
    moved(writer.run, address_of(tmp_path / "remote"))
    (tmp_path / "remote" / "run.zarr" / SMALL / "data" / "c" / "0" / "0" / "0").write_bytes(old)
    series = capd.open(writer.run)[SMALL]
    expected = next(held for (key, _), held in again.held.items() if key == series.key)
    for number in range(8):
        assert series.numpy(number).tobytes() == expected[number][1].tobytes()
    for number in range(8, 16):
        with pytest.raises(DamagedRecord, match="no COMMIT frame names it"):
            series.numpy(number)


def test_without_the_extra_the_message_says_what_to_install(run: Writer, monkeypatch) -> None:
    """One line that names the record, its address and the package."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StoreError) as caught:
        capd.open(run.run)[LARGE].numpy(0)
    assert "was moved to file:///" in str(caught.value)
    assert 'pip install "capd[store]"' in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreachable_store_is_named(tmp_path: Path, monkeypatch) -> None:
    """Nobody listens at the endpoint: one line says so, and the records that are here are read."""
    from capd.store.objects.address import parse_address
    from capd.store.scan.moved_shard import MovedShard, encode_stub, moved_shard

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    writer = written(tmp_path / "store")
    moved(writer.run, address_of(tmp_path / "remote"))
    file = shard_files(writer.run / LARGE)[0]
    stub = moved_shard(writer.run, file)
    assert stub is not None
    there = MovedShard(parse_address("s3://bucket/run.zarr"), stub.key, stub.nbytes, stub.crc32c)
    file.write_bytes(encode_stub(there))
    series = capd.open(writer.run)[LARGE]
    with pytest.raises(StoreError, match=r"#0 was moved to s3://bucket/run\.zarr/.*: ") as caught:
        series.numpy(0)
    assert not isinstance(caught.value, DamagedRecord)
    assert series.numpy(len(series) - 1).any()


def test_a_run_goes_on_after_its_shards_were_moved(run: Writer, tmp_path: Path) -> None:
    """The next job continues the last shards; they are moved later, and everything is read."""
    again = Writer(run.run.parent, shard_nbytes=1 << 20)
    again.held, again.sequence = run.held, run.sequence
    put_steps(again, 9, 14)
    again.close()
    assert not again.outcomes.refusals
    assert verify_run(again.run).ok
    assert_capd_reads(again.run, again.held)
    before = {path: set(moved_shards(again.run, path)) for path in (LARGE, SMALL)}
    remote = tmp_path / "remote" / "run.zarr"
    for path in (LARGE, SMALL):
        for number in before[path]:
            assert (remote / path / "data" / "c" / str(number) / "0" / "0").is_file()


def test_a_lost_catalog_is_rebuilt_from_the_published_moments(run: Writer, caplog) -> None:
    """Numbers, moments and shapes stay; the elements are read from the object store; the rest of the run is whole."""
    before = content_of(run.run)
    catalog = run.run / ".capd" / "node=n0" / CATALOG_NAME
    catalog.unlink()
    with caplog.at_level(logging.WARNING):
        without = [len(series) for series in capd.open(run.run).series]
    assert without == [9, 72]
    writer = Writer(run.run.parent, shard_nbytes=1 << 20)
    writer.held, writer.sequence = run.held, run.sequence
    put_steps(writer, 9, 12)
    writer.close()
    assert not writer.outcomes.refusals
    assert verify_run(run.run).ok
    store = capd.open(run.run)
    for (key, _), held in run.held.items():
        [series] = [one for one in store.series if one.key == key]
        assert [record.iteration for record in series.records] == [moment.iteration for moment, _ in held]
        for number, (_, bits) in enumerate(held):
            assert series.numpy(number).tobytes() == bits.tobytes()
    assert before.keys() == content_of(run.run).keys()


def test_a_damaged_catalog_and_a_spool_with_more(tmp_path: Path) -> None:
    """A kill, moved shards and no catalog at once: nothing that is in the spool is lost or renumbered."""
    from tests.kit.store.damaging import image

    writer = written(tmp_path / "store", steps=5)
    moved(writer.run, address_of(tmp_path / "remote"))
    again = Writer(writer.run.parent, shard_nbytes=1 << 20)
    again.held, again.sequence = writer.held, writer.sequence
    put_steps(again, 5, 8)
    again.flush()
    killed = image(again, tmp_path / "killed")
    again.close()
    (killed / ".capd" / "node=n0" / CATALOG_NAME).write_bytes(b"no catalog at all")
    for suffix in ("-wal", "-shm"):
        (killed / ".capd" / "node=n0" / f"{CATALOG_NAME}{suffix}").unlink(missing_ok=True)
    last = Writer(killed.parent, shard_nbytes=1 << 20)
    last.close()
    assert verify_run(killed).ok
    store = capd.open(killed)
    for (key, _), held in again.held.items():
        [series] = [one for one in store.series if one.key == key]
        assert len(series) == len(held)
        for number, (moment, bits) in enumerate(held):
            assert series.records[number].iteration == moment.iteration
            assert series.numpy(number).tobytes() == bits.tobytes()


def test_a_removed_stub_is_a_missing_shard(run: Writer) -> None:
    """What verify says of a shard that is neither here nor moved stays damage."""
    shutil.rmtree(run.run / LARGE / "data" / "c" / "0")
    assert any("the shard is missing" in one.what for one in verify_run(run.run).damaged)


@pytest.mark.parametrize("has_catalog", [True, False])
def test_a_repair_brings_moved_shards_back(run: Writer, tmp_path: Path, has_catalog: bool) -> None:
    """The new run has every record with its statistics, on this disk; what is lost in the object store is listed."""
    from capd.store.repair.repair import repair

    if not has_catalog:
        (run.run / ".capd" / "node=n0" / CATALOG_NAME).write_bytes(b"no catalog")
    done = repair(run.run, tmp_path / "new.zarr")
    assert done.is_complete
    assert_capd_reads(done.new, run.held)
    assert not any(moved_shards(done.new, path) for path in (LARGE, SMALL))
    (tmp_path / "remote" / "run.zarr" / LARGE / "data" / "c" / "0" / "0" / "0").unlink()
    done = repair(run.run, tmp_path / "second.zarr")
    assert [(one.path, one.number) for one in done.lost] == [(LARGE, 0), (LARGE, 1)]


def test_a_repair_without_the_object_store_is_refused(run: Writer, tmp_path: Path, monkeypatch) -> None:
    """Records that cannot be reached are not lost, so no run without them is made."""
    from capd.store.repair.repair import repair

    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StoreError, match="cannot bring back the shard that was moved to file:///"):
        repair(run.run, tmp_path / "new.zarr")
    assert not (tmp_path / "new.zarr").exists()


@pytest.mark.parametrize("is_reachable", [True, False])
def test_a_rebuilt_catalog_has_the_rows_of_the_upload(tmp_path: Path, caplog, is_reachable: bool) -> None:
    """Statistics, clients and sequences come from the segments, so nothing is lost; else a line says so."""
    writer = written(tmp_path / "store")
    to = address_of(tmp_path / "remote")
    upload(writer.run, to)
    before = tables(writer.run)
    assert sum(len(moved_shards(writer.run, path)) for path in (LARGE, SMALL)) == 8
    if not is_reachable:
        (tmp_path / "remote" / "run.zarr" / ".capd" / "node=n0" / "manifest.json").unlink()
    with caplog.at_level(logging.INFO):
        rebuild_catalog(writer.run, "n0")
    assert verify_run(writer.run).ok
    assert ("statistics and metadata are unknown here" in caplog.text) != is_reachable
    after = tables(writer.run)
    if is_reachable:
        assert after["records"] == before["records"]
        assert after["acked"] == before["acked"]
        assert_capd_reads(writer.run, writer.held)
        upload(writer.run, to)
        assert content_of(to / "run.zarr") == content_of(writer.run)
    else:
        assert len(after["records"]) == len(before["records"])


def test_a_daemon_that_lost_its_catalog_takes_the_rows_of_the_upload(tmp_path: Path) -> None:
    """A capture that a client sends again is recognised, although its shard was moved."""
    writer = written(tmp_path / "store")
    upload(writer.run, address_of(tmp_path / "remote"))
    before = content_of(writer.run)
    (writer.run / ".capd" / "node=n0" / CATALOG_NAME).unlink()
    again = Writer(writer.run.parent, shard_nbytes=1 << 20)
    assert again.pipeline.committed("run", CLIENT) == [(1, writer.sequence)]
    again.close()
    assert content_of(writer.run) == before
