"""A catalog that is lost while the object store is away costs nothing of what is there."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

import capd
from capd.errors import ObjectStoreError
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.objects.address import Address, parse_address
from capd.store.objects.bucket import Bucket
from capd.store.remote import moved_rows
from capd.store.remote.node import RemoteNode
from capd.store.remote.windows import WindowCache
from capd.store.scan.moved_shard import encode_stub
from capd.store.scan.survey import moved_shards, shard_files
from capd.store.upload.moving import ShardMover
from capd.store.upload.node_upload import NodeUpload
from capd.store.upload.sending.transfer import UploadTools
from tests.kit.store.cli import session_row
from tests.kit.store.content import content_of
from tests.kit.store.moving import AT_ONCE, LARGE, SMALL, address_of, put_steps
from tests.kit.store.writing import Writer


def upload(run: Path, to: Address) -> None:
    """One round, then all shards that may go."""
    with NodeUpload(run, "n0", to, UploadTools.make()) as node:
        node.round()
        part = node.uploaded()
        assert part is not None
        ShardMover(AT_ONCE).move([part])


def lost_and_continued(root: Path, to: Address) -> tuple[Writer, dict[str, list[bytes]]]:
    """A moved run whose catalog was lost while the store was away. Return the bodies of the rows that were there."""
    writer = Writer(root, shard_nbytes=1 << 20)
    put_steps(writer, 0, 9)
    row = session_row(state="live", offered=writer.sequence, committed=writer.sequence, dropped={})
    writer.pipeline.save_session(writer.run_id, row)
    writer.close()
    upload(writer.run, to)
    before = bodies(to)
    place = Path("/", to.key)
    place.rename(place.with_name("away"))
    for file in (writer.run / ".capd" / "node=n0").glob(f"{CATALOG_NAME}*"):
        file.unlink()
    # Other ids, because the series begin in another order; and shards that join those that are there.
    again = Writer(root, shard_nbytes=1 << 20)
    again.held, again.sequence = writer.held, writer.sequence
    put_steps(again, 9, 12)
    again.close()
    for made in sorted(place.rglob("*"), reverse=True) if place.exists() else ():
        made.rmdir()
    if place.exists():
        place.rmdir()
    place.with_name("away").rename(place)
    return again, before


def node_at(to: Address) -> RemoteNode:
    """The node as a reader finds it."""
    bucket = Bucket(to / "run.zarr")
    return RemoteNode(bucket, WindowCache(bucket), "n0")


def bodies(to: Address) -> dict[str, list[bytes]]:
    """The bodies of all rows by series."""
    node = node_at(to)
    return {
        path: [one.body for one in node.bodies(path, 0, entry.row.records)]
        for path, entry in node.entries.items()
    }


def test_rows_that_only_the_object_store_has_stay_there(tmp_path: Path) -> None:
    """Statistics, metadata, clients and counters of before are there after the next manifest, beside the new ones."""
    to = address_of(tmp_path / "remote")
    writer, before = lost_and_continued(tmp_path / "store", to)
    upload(writer.run, to)
    after = bodies(to)
    assert {path: len(found) for path, found in after.items()} == {LARGE: 12, SMALL: 96}
    for path, found in before.items():
        assert after[path][: len(found)] == found
    assert [(one.offered, one.state) for one in node_at(to).sessions] == [(81, "died")]
    assert all(record for record in content_of(to / "run.zarr").values())
    generation = node_at(to).manifest.generation
    upload(writer.run, to)
    assert node_at(to).manifest.generation == generation


def test_rows_that_cannot_be_read_stay_until_they_can(tmp_path: Path, monkeypatch) -> None:
    """A store that does not answer for the segment fails the round, and nothing is replaced."""
    to = address_of(tmp_path / "remote")
    writer, before = lost_and_continued(tmp_path / "store", to)

    def unreachable(*_: object) -> bytes:
        raise ObjectStoreError("nobody answers", reason="unreachable", retry=True)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "get_range", unreachable)
        with pytest.raises(ObjectStoreError, match="nobody answers"):
            upload(writer.run, to)
    assert bodies(to) == before
    upload(writer.run, to)
    assert all(bodies(to)[path][: len(found)] == found for path, found in before.items())


def test_rows_that_are_gone_there_do_not_stop_the_upload(tmp_path: Path, caplog) -> None:
    """One line names the segment that somebody deleted, and the run goes up with what is known here."""
    to = address_of(tmp_path / "remote")
    writer, _ = lost_and_continued(tmp_path / "store", to)
    [segment] = (tmp_path / "remote" / "run.zarr" / ".capd" / "node=n0").glob("records-*.parquet")
    segment.unlink()
    upload(writer.run, to)
    assert {path: len(found) for path, found in bodies(to).items()} == {LARGE: 12, SMALL: 96}
    said = [
        one.message for one in caplog.records if "the rows that were uploaded cannot be read" in one.message
    ]
    assert len(said) == 2


def test_a_store_that_hangs_does_not_hold_a_run(tmp_path: Path, monkeypatch, caplog) -> None:
    """A server takes the connection and never answers: the run opens, says so, and captures."""
    monkeypatch.setattr(moved_rows, "_PATIENCE_S", 0.5)
    writer = Writer(tmp_path / "store", shard_nbytes=1 << 20)
    put_steps(writer, 0, 9)
    writer.close()
    upload(writer.run, address_of(tmp_path / "remote"))
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("AWS_ALLOW_HTTP", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "true")
        for path in (LARGE, SMALL):
            for number, one in moved_shards(writer.run, path).items():
                there = replace(one, to=parse_address("s3://bucket/run.zarr"))
                shard_files(writer.run / path)[number].write_bytes(encode_stub(there))
        (writer.run / ".capd" / "node=n0" / CATALOG_NAME).unlink()
        again = Writer(tmp_path / "store", shard_nbytes=1 << 20)
        again.sequence = writer.sequence
        put_steps(again, 9, 10)
        again.close()
    assert not again.outcomes.refusals
    assert caplog.text.count("no answer within") == 1
    assert len(capd.open(writer.run)[LARGE]) == 10
