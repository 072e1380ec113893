"""On a network file system the live catalog is local, and readers always find a whole snapshot in the store."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path

import pytest

from capd.store.catalog import place as catalog_place
from capd.store.catalog.place import CatalogPlace, is_network, live_catalog, publish_snapshot

MOUNTS = """\
22 1 0:21 / / rw,relatime - ext4 /dev/vda rw
30 22 0:30 / /home rw - nfs4 server:/home rw,vers=4.2
31 22 0:31 / /scratch/with\\040blank rw shared:7 - lustre mds@tcp:/fs rw
32 30 0:32 / /home/local rw - xfs /dev/nvme0n1 rw
33 22 0:33 / /mnt/s3 rw - fuse.s3fs s3fs rw
34 22 0:34 / /mnt/usb rw - fuseblk /dev/sdb1 rw
35 22 0:35 / /data rw - ext4 /dev/vdb rw
36 35 0:36 / /data rw - cifs //nas/data rw
broken line
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS)
    return path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/var/lib/captures", False),
        ("/home/user/captures", True),
        ("/homes", False),
        ("/home/local/captures", False),
        ("/scratch/with blank/x", True),
        ("/mnt/s3/x", True),
        ("/mnt/usb/x", False),
        ("/data/x", True),
    ],
)
def test_the_deepest_and_latest_mount_decides(path: str, expected: bool, mounts: Path) -> None:
    assert is_network(Path(path), mounts) is expected


def test_without_a_mount_table_a_path_counts_as_local(tmp_path: Path) -> None:
    assert not is_network(tmp_path, tmp_path / "absent")
    assert not is_network(Path("/proc/self"))


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node directory that counts as lying on the network."""
    store = tmp_path / "network"
    node = store / "run.zarr" / ".capd" / "node=a"
    (node / "spool").mkdir(parents=True)
    monkeypatch.setattr(catalog_place, "is_network", lambda path: path.is_relative_to(store))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return node


def test_on_local_disk_the_catalog_lies_beside_the_spool(tmp_path: Path) -> None:
    place = CatalogPlace(tmp_path)

    assert place.live == place.published == tmp_path / "catalog.sqlite"
    assert not place.is_apart


def test_on_the_network_every_node_has_a_private_place_of_its_own(network: Path, tmp_path: Path) -> None:
    first, other = live_catalog(network), live_catalog(network.with_name("node=b"))

    assert first.is_relative_to(tmp_path / "state" / "capd")
    assert first.parent.stat().st_mode & 0o777 == 0o700
    assert first != other
    assert first == live_catalog(network)


def test_a_state_directory_on_the_network_or_of_somebody_else_is_not_used(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_place.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    fallback = tmp_path / "tmp" / f"capd-{os.getuid()}"

    monkeypatch.setenv("XDG_STATE_HOME", str(network / "home"))
    assert live_catalog(network).is_relative_to(fallback)

    (tmp_path / "open" / "capd").mkdir(parents=True)
    (tmp_path / "open" / "capd").chmod(0o777)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "open"))
    assert live_catalog(network).is_relative_to(fallback)

    fallback.chmod(0o777)
    assert live_catalog(network) == network / "catalog.sqlite"  # no place that can be trusted


def written(place: CatalogPlace, *values: int) -> sqlite3.Connection:
    """The live catalog, open in WAL mode as the daemon has it, with these rows added."""
    db = sqlite3.connect(place.live, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("CREATE TABLE IF NOT EXISTS t (x INTEGER)")
    db.executemany("INSERT INTO t VALUES (?)", [(value,) for value in values])
    return db


def rows(path: Path) -> list[int]:
    db = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    try:
        return [x for (x,) in db.execute("SELECT x FROM t ORDER BY x")]
    finally:
        db.close()


def test_a_snapshot_holds_what_the_log_holds_and_reading_it_makes_no_files(network: Path) -> None:
    place = CatalogPlace(network)
    db = written(place, 1, 2)
    place.publish(db)

    assert rows(place.published) == [1, 2]
    assert sorted(path.name for path in network.iterdir()) == ["catalog.sqlite", "spool"]
    assert not list((network / "spool").iterdir())
    assert place.published.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in place.live.parent.iterdir()) == [
        "catalog.sqlite", "catalog.sqlite-shm", "catalog.sqlite-wal",
    ]  # fmt: skip
    db.close()


def test_a_daemon_begins_with_the_snapshot_and_not_with_an_old_local_copy(network: Path) -> None:
    place = CatalogPlace(network)
    db = written(place, 1)
    place.publish(db)
    written(place, 99).close()  # never published
    db.close()

    place.fetch()

    assert rows(place.live) == [1]
    place.published.unlink()
    place.fetch()
    assert not place.live.exists()


def test_a_snapshot_that_fails_leaves_the_one_before(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = CatalogPlace(network)
    db = written(place, 1)
    place.publish(db)

    def fail(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    written(place, 2).close()
    monkeypatch.setattr(catalog_place, "rename", fail)
    with pytest.raises(OSError, match="No space"):
        place.publish(db)

    assert rows(place.published) == [1]
    assert not list((network / "spool").iterdir())
    db.close()


def test_readers_see_whole_snapshots_while_they_are_replaced(network: Path) -> None:
    place = CatalogPlace(network)
    db = written(place, 0)
    place.publish(db)
    done = threading.Event()
    seen: list[list[int]] = []

    def read() -> None:
        while not done.is_set():
            seen.append(rows(place.published))

    reader = threading.Thread(target=read)
    reader.start()
    for last in range(1, 20):
        db.execute("INSERT INTO t VALUES (?)", (last,))
        publish_snapshot(db, place.live.with_suffix(".snapshot"), place.published, network / "spool")
    done.set()
    reader.join()
    db.close()

    assert seen
    assert all(found == list(range(len(found))) for found in seen)
    assert [len(found) for found in seen] == sorted(len(found) for found in seen)


def test_discard_removes_the_local_copy_only(network: Path) -> None:
    place = CatalogPlace(network)
    db = written(place, 1)
    place.publish(db)
    db.close()

    place.discard()

    assert not list(place.live.parent.iterdir())
    assert rows(place.published) == [1]
