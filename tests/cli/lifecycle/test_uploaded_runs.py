"""Runs that are uploaded leave this disk only when they are wholly elsewhere, and lists say where they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from capd.store.alerts.file import alerts_path
from capd.store.disk.layout import node_directory
from capd.store.keeps.file import keeps_path, write_keeps
from capd.store.keeps.keep import Keep
from capd.store.objects.address import Address
from capd.store.upload.moving import ShardMover
from capd.store.upload.node_upload import NodeUpload
from capd.store.upload.sending.transfer import UploadTools
from tests.kit.store.alerting import alert, give_alerts
from tests.kit.store.cli import Result
from tests.kit.store.moving import AT_ONCE, address_of, put_steps, written
from tests.kit.store.removing import age
from tests.kit.store.writing import Writer

Capd = Callable[..., Result]


def upload(run: Path, to: Address, *, moves: bool = False) -> None:
    """Bring a run to an object store as a daemon does, and move its shards if wanted."""
    with NodeUpload(run, "n0", to, UploadTools.make()) as node:
        node.round()
        if moves:
            part = node.uploaded()
            assert part is not None
            mover = ShardMover(AT_ONCE)
            mover.move([part])
            assert mover.shards


@pytest.fixture
def remote(tmp_path: Path) -> Address:
    """An object store."""
    return address_of(tmp_path / "remote")


@pytest.fixture
def run(tmp_path: Path, remote: Address) -> Writer:
    """The writer of a run that is wholly uploaded."""
    writer = written(tmp_path / "captures", steps=5)
    upload(writer.run, remote)
    return writer


def go_on(writer: Writer) -> None:
    """Continue a run, without its upload."""
    again = Writer(writer.run.parent, shard_nbytes=1 << 20)
    again.held, again.sequence = writer.held, writer.sequence
    put_steps(again, 5, 6)
    again.close()


def test_an_uploaded_run_is_removed_and_its_objects_stay(run: Writer, capd: Capd, tmp_path: Path) -> None:
    """The command says where it stays; a restore brings the local one back."""
    done = capd("rm", run.run, "--yes")
    assert done.code == 0, done.err
    assert f"stays at file://{tmp_path}/remote/run.zarr" in done.err
    assert not run.run.exists()
    assert (tmp_path / "remote" / "run.zarr" / "zarr.json").is_file()


def test_a_run_with_more_than_its_object_store_is_refused(run: Writer, capd: Capd) -> None:
    """The message counts what is missing there; --force-unsynced names the loss, and removes it."""
    go_on(run)
    done = capd("rm", run.run, "--yes")
    assert done.code == 1
    assert "is not wholly uploaded, nothing removed: 9 records (" in done.err
    assert "of node n0 are not at file://" in done.err
    assert "--force-unsynced" in done.err
    assert run.run.exists()
    done = capd("rm", run.run, "--yes", "--force-unsynced")
    assert done.code == 0
    assert "9 records (" in done.err
    assert "they are lost when the trash is freed" in done.err
    assert not run.run.exists()


def give_a_keep(run: Path) -> Path:
    write_keeps(run, {"n0": [Keep(1, "asked", 0, 3, 2, 4, "n0")]})
    return keeps_path(run, "n0")


def give_an_alert(run: Path) -> Path:
    give_alerts(run, "n0", alert(1))
    return alerts_path(run, "n0")


@pytest.mark.parametrize("give", [give_an_alert, give_a_keep])
def test_alerts_and_keeps_that_came_after_the_upload_keep_the_run(
    run: Writer, capd: Capd, remote: Address, give: Callable[[Path], Path]
) -> None:
    """They are a part of it. A run whose file of them is lost has all that the object store has."""
    policy = ("prune", run.run.parent, "--keep-within", "1s", "--only-uploaded", "--json")
    lines = give(run.run)
    done = capd("rm", run.run, "--yes")
    assert done.code == 1
    assert "of node n0, the newest alerts or keeps are not at file://" in done.err
    shutil.copytree(run.run, run.run.with_name("newer.zarr"))
    age(run.run, 20)
    reasons = {one["run"]: one["reason"] for one in capd(*policy).json["runs"]}
    assert reasons["run"] == "not uploaded"
    upload(run.run, remote)
    lines.unlink()
    assert capd("rm", run.run, "--yes").code == 0


def test_one_run_that_is_not_uploaded_keeps_all(run: Writer, capd: Capd, tmp_path: Path) -> None:
    """As every other refusal."""
    other = tmp_path / "captures" / "other.zarr"
    shutil.copytree(run.run, other)
    go_on(run)
    assert capd("rm", other, run.run, "--yes").code == 1
    assert other.exists()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda remote: shutil.rmtree(remote / "run.zarr" / ".capd"), "are not at file://"),
        (lambda remote: (remote / "run.zarr/.capd/node=n0/manifest.json").write_bytes(b"{}"), "no manifest"),
    ],
)
def test_a_manifest_that_is_gone_or_damaged_shows_nothing(
    run: Writer, capd: Capd, tmp_path: Path, spoil, says
) -> None:
    """What nobody can see elsewhere counts as not uploaded."""
    spoil(tmp_path / "remote")
    done = capd("rm", run.run, "--yes")
    assert done.code == 1
    assert says in done.err
    assert run.run.exists()


@pytest.mark.parametrize("spoil", [Path.unlink, lambda place: os.truncate(place, 9)])
def test_objects_that_somebody_deleted_or_cut_keep_the_run(
    run: Writer, capd: Capd, remote: Address, spoil: Callable[[Path], None]
) -> None:
    """A manifest outlives its objects, for example by a rule of the bucket: the local run is then the only one."""
    shards = sorted(Path("/", remote.key, "run.zarr").rglob("data/c/1/0/0"))
    for shard in shards:
        spoil(shard)
    done = capd("rm", run.run, "--yes")
    assert done.code == 1
    assert "is not wholly uploaded, nothing removed" in done.err
    assert "data/c/1/0/0: " in done.err
    assert "and 1 more of the kind" in done.err
    assert run.run.exists()
    done = capd("prune", run.run.parent, "--keep-within", "1s", "--only-uploaded", "--yes")
    assert run.run.exists()


def test_the_manifest_of_another_store_counts_for_nothing(run: Writer, capd: Capd, remote: Address) -> None:
    """A second store of the same names at the same place: the first one is not uploaded any more."""
    state = node_directory(run.run, "n0") / "remote.json"
    state.write_bytes(state.read_bytes().replace(b'"origin":"', b'"origin":"00'))
    done = capd("rm", run.run, "--yes")
    assert done.code == 1
    assert "is of another store" in done.err


def test_a_run_that_the_configuration_uploads_is_not_removed_before(tmp_path: Path, capd: Capd) -> None:
    """With [upload] a run that no round reached yet is refused; without it, or by another pattern, it goes."""
    writer = written(tmp_path / "captures", steps=2)
    environ = {"CAPD_UPLOAD_TO": "s3://bucket/captures", "CAPD_STORE": str(tmp_path / "captures")}
    done = capd("rm", writer.run, "--yes", **environ)
    assert done.code == 1
    assert "of node n0 were never uploaded" in done.err
    assert capd("rm", writer.run, "--yes", **environ, CAPD_UPLOAD_RUNS="other*").code == 0


def test_prune_keeps_what_is_not_uploaded(run: Writer, capd: Capd, tmp_path: Path) -> None:
    """The reason is in the table, and the next oldest run goes instead."""
    root = tmp_path / "captures"
    for name in ("newer", "newest"):
        shutil.copytree(run.run, root / f"{name}.zarr")
        (node_directory(root / f"{name}.zarr", "n0") / "remote.json").unlink()
    age(run.run, 20)
    age(root / "newer.zarr", 10)
    found = capd("prune", root, "--keep-last", "1", "--only-uploaded", "--json")
    assert found.code == 0, found.err
    reasons = {one["run"]: (one["keep"], one["reason"]) for one in found.json["runs"]}
    assert reasons["newer"] == (True, "not uploaded")
    assert reasons["run"][0] is False
    assert capd("prune", root, "--keep-last", "1", "--only-uploaded", "--yes").code == 0
    assert sorted(path.stem for path in root.glob("*.zarr")) == ["newer", "newest"]
    assert capd("prune", root, "--only-uploaded").code == 2


def test_the_rules_of_the_file_keep_what_is_not_uploaded(run: Writer, capd: Capd, tmp_path: Path) -> None:
    """[upload] makes only_uploaded the default of [retention]."""
    root = tmp_path / "captures"
    shutil.copytree(run.run, root / "other.zarr")
    (node_directory(root / "other.zarr", "n0") / "remote.json").unlink()
    age(root / "other.zarr", 20)
    age(run.run, 10)
    file = tmp_path / "capd.toml"
    for line, reason in (("", "not uploaded"), ("only_uploaded = false\n", "no rule keeps it")):
        file.write_text(f'[upload]\nto = "s3://bucket/captures"\n[retention]\nkeep_last = 1\n{line}')
        found = capd("prune", root, "--config", file, "--json")
        [one] = [one for one in found.json["runs"] if one["run"] == "other"]
        assert reason in one["reason"]


def test_lists_show_where_a_run_is_and_what_it_takes_here(run: Writer, capd: Capd, remote: Address) -> None:
    """runs and du count the bytes of this disk, and those that are in the object store alone."""
    [before] = capd("runs", run.run.parent, "--json").json
    usage = capd("du", run.run.parent, "--json").json["groups"][0]
    assert (before["uploaded_to"], before["moved_bytes"]) == (f"{remote}/run.zarr", 0)
    assert (usage["uploaded_to"], usage["moved_bytes"]) == (f"{remote}/run.zarr", 0)
    upload(run.run, remote, moves=True)
    [after] = capd("runs", run.run.parent, "--json").json
    assert after["moved_bytes"] > 1 << 20
    assert after["size"] == before["size"] - after["moved_bytes"]
    assert after["stored_bytes"] == before["stored_bytes"]
    now = capd("du", run.run.parent, "--json").json["groups"][0]
    assert now["moved_bytes"] == after["moved_bytes"]
    assert now["stored_bytes"] == usage["stored_bytes"] - after["moved_bytes"]
    by = capd("du", run.run, "--by", "tensor_name", "--json").json["groups"]
    assert sum(one["moved_bytes"] for one in by) == after["moved_bytes"]
    table = capd("runs", run.run.parent, "--wide").out
    assert "moved MiB" in table
    assert f"{remote}/run.zarr" in table
    assert "in an object store alone" in capd("du", run.run.parent).err
    disk = capd("du", run.run.parent, "--check", "--json").json["groups"][0]["disk_bytes"]
    assert disk < now["stored_bytes"] + (1 << 20)


def test_a_run_with_moved_shards_is_wholly_uploaded(run: Writer, capd: Capd, remote: Address) -> None:
    """It may leave, and comes back."""
    upload(run.run, remote, moves=True)
    assert capd("rm", run.run, "--yes").code == 0
    assert capd("rm", run.run, "--restore").code == 0
    assert capd("verify", run.run).code == 0


def test_leftovers_of_a_killed_move_are_freed(run: Writer, capd: Capd) -> None:
    """`capd gc` finds a stub that never took its place."""
    left = node_directory(run.run, "n0") / f"moving-{os.getpid()}-1.tmp"
    left.write_bytes(b"x")
    assert capd("gc", run.run.parent, "--yes").code == 0
    assert not left.exists()
