"""A store on a network file system: the catalog is written on local disk, and nothing that was acknowledged hides."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import capd
from capd.store.catalog import place
from capd_client.protocol.counter_page import DropReason
from tests.fault.kit.file_systems import mounted_tmpfs
from tests.kit.store.damaging import image
from tests.kit.store.reading import assert_capd_reads, assert_zarr_readers_read
from tests.kit.store.writing import Writer, key

RNG = np.random.default_rng(5)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store root that counts as lying on the network, with local state of its own."""
    network = tmp_path / "network"
    monkeypatch.setattr(place, "is_network", lambda path: path.is_relative_to(network))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (network / "captures").mkdir(parents=True)
    return network / "captures"


def put(writer: Writer, first: int, last: int) -> None:
    for iteration in range(first, last):
        large = np.frombuffer(RNG.bytes(400 << 10), "f4").reshape(100, 1024)
        writer.put(key("large"), "float32", large, iteration=iteration)
        for call in range(20):
            writer.put(key("small"), "int64", RNG.integers(0, 99, 2000), iteration=iteration, call=call)
    writer.flush()


def local_files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "state").rglob("*") if path.is_file()]


def test_what_is_sealed_while_the_daemon_works_is_in_the_snapshot(root: Path, tmp_path: Path) -> None:
    writer = Writer(root, shard_nbytes=1 << 20)
    for first in range(0, 12, 4):
        put(writer, first, first + 4)
        assert list(writer.run.glob("*/*/*/*/*large/data/c/*"))  # sealed, and gone from the spool
        assert_capd_reads(writer.run, writer.held)
    assert local_files(tmp_path)
    assert not list(writer.run.glob(".capd/node=n0/catalog.sqlite-*"))

    writer.close()

    assert not local_files(tmp_path)
    assert_capd_reads(writer.run, writer.held)
    assert_zarr_readers_read(writer.run, writer.held)


def test_a_full_disk_of_the_local_catalog_is_named_and_not_that_of_the_store(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted_tmpfs(tmp_path / "local", "size=4m") as local:
        monkeypatch.setenv("XDG_STATE_HOME", str(local / "state"))
        writer = Writer(root)
        put(writer, 0, 1)
        found = os.statvfs(local)
        (local / "ballast").write_bytes(bytes(found.f_bavail * found.f_frsize))
        for number in range(40):
            writer.put(key(f"new{number}"), "int64", RNG.integers(0, 99, 2000))
        writer.flush()
        texts = {text for _, _, text in writer.outcomes.refusals}
        assert texts
        assert all(
            f"the file system {local} has no room left for {local / 'state'}" in text for text in texts
        )
        assert {reason for _, reason, _ in writer.outcomes.refusals} == {DropReason.DISK_FULL}
        (local / "ballast").unlink()
        refused = {sequence for sequence, _, _ in writer.outcomes.refusals}
        assert len(refused) < writer.sequence
        writer.pipeline.close(30)


def test_after_a_kill_the_node_goes_on_without_its_local_copy(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(root, shard_nbytes=1 << 20)
    put(writer, 0, 6)
    after_a_kill = image(writer, root.with_name("after")).parent
    writer.close()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))

    again = Writer(after_a_kill, shard_nbytes=1 << 20)
    again.sequence, again.held = writer.sequence, writer.held
    assert_capd_reads(again.run, again.held)
    put(again, 6, 9)
    again.close()

    assert_capd_reads(again.run, again.held)
    assert_zarr_readers_read(again.run, again.held)
    assert len(capd.open(again.run).series) == 2
