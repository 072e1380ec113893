"""`capd cp`: the copy equals its source, appears when it is complete, and continues after a kill at any step."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import capd as reader
from capd_client.protocol.key import Moment
from capd_client.protocol.scalars import scalar_key
from tests.kit.daemon import DaemonProcess, daemons
from tests.kit.store.cli import Result, StoreWriter, linear_key, run_capd, session_row
from tests.kit.tiers import rows

Capd = Callable[..., Result]
RNG = np.random.default_rng(11)
SCALAR = scalar_key("loss", 0)
FILE_STEPS = (
    "copy.before_rename",
    "copy.after_file",
    "copy.after_files",
    "copy.after_verify",
    "copy.after_publish",
)
RECORD_STEPS = (
    "claim.before_rename", "commit.after_write", "log.after_write", "settle.before_append", "copy.after_series",
    "seal.after_rename", "seal.after_documents", "copy.after_records", "copy.after_verify", "copy.after_publish",
)  # fmt: skip


def fill(root: Path, run_id: str = "run", *, attempt: int = 0, scale: float = 1.0) -> Path:
    """A run with small and large records, a scalar and a session."""
    writer = StoreWriter(root)
    for step in range(3):
        moment = Moment(iteration=step, attempt=attempt, time_ns=5 + step)
        small = RNG.normal(scale=scale, size=(16, 16)).astype("f4")
        large = RNG.normal(scale=scale, size=(512, 256)).astype("f4")
        writer.put(run_id, linear_key(), small, "float32", moment, metadata=b'{"note": "kept"}')
        writer.put(run_id, linear_key(tensor_name="weight"), large, "float32", moment, attributes={"a": [1]})
        writer.put(run_id, SCALAR, np.array(2.5 + step), "float64", moment)
    writer.save_session(run_id, session_row(attempt=attempt))
    writer.close()
    return root / f"{run_id}.zarr"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("source"))


def content(run: Path) -> dict[str, list[tuple[object, ...]]]:
    """All records of a run: moments, statistics, metadata and bits."""
    store = reader.open(run)
    return {
        series.path: [
            (series.row(n).capture, series.row(n).moment, series.record(n).metadata, series.record(n).attributes,
             series.record(n).stats, series.read(n).tobytes())
            for n in series.numbers
        ]
        for series in store.everything()
    }  # fmt: skip


def hidden(new: Path) -> Path:
    return new.with_name(f".{new.name}.copy")


def assert_copied(source: Path, new: Path) -> None:
    assert content(new) == content(source)
    assert [row.client for row in reader.open(new).sessions] == [
        row.client for row in reader.open(source).sessions
    ]
    assert not hidden(new).exists()


def test_a_copy_has_the_files_of_its_source(capd: Capd, source: Path, tmp_path: Path) -> None:
    new = tmp_path / "there" / "new.zarr"
    before = {path.relative_to(source): path.stat().st_mtime_ns for path in source.rglob("*")}
    done = capd("cp", source, new, "--json")

    assert done.code == 0, done.err
    assert done.json["records"] == 9
    assert done.json["written"] is True
    assert_copied(source, new)
    assert {path.relative_to(source): path.stat().st_mtime_ns for path in source.rglob("*")} == before
    files = {path.relative_to(new) for path in new.rglob("*") if path.is_file()}
    assert files == {path for path in before if (source / path).is_file()}
    assert all(path.stat().st_mode & 0o077 == 0 for path in new.rglob("*"))
    assert capd("verify", new).code == 0


def test_a_dry_run_writes_nothing(capd: Capd, source: Path, tmp_path: Path) -> None:
    done = capd("cp", source, tmp_path / "new.zarr", "--dry-run")
    assert done.code == 0
    assert "9 records of 3 series" in done.out
    assert "nothing is written" in done.out
    assert list(tmp_path.iterdir()) == []


def test_series_of_a_glob_and_another_codec(capd: Capd, source: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.zarr"
    assert capd("cp", source, new, "--series", "*weight", "--recode", "zstd:9").code == 0
    copied, before = content(new), content(source)
    assert list(copied) == [path for path in before if path.endswith("weight")]
    assert all(copied[path] == before[path] for path in copied)
    [series] = reader.open(new).series
    assert series.header.codec == "zstd:9"
    assert capd("verify", new).code == 0


def test_statistics_only_keeps_scalars_whole(capd: Capd, source: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.zarr"
    assert capd("cp", source, new, "--stats-only").code == 0
    kept = {series.key.tensor_name: series for series in reader.open(new).find()}
    assert {name: series.kept for name, series in kept.items()} == {
        "input": "statistics",
        "weight": "statistics",
    }
    for series in reader.open(source).find():
        same = kept[series.key.tensor_name]
        assert [record.stats for record in same.records] == [record.stats for record in series.records]
        assert same.records[0].attributes == series.records[0].attributes
    assert reader.open(new).scalar("loss").values.tolist() == [2.5, 3.5, 4.5]
    assert capd("verify", new).code == 0


def test_one_attempt_can_be_copied(capd: Capd, tmp_path: Path) -> None:
    root = tmp_path / "store"
    writer = StoreWriter(root)
    for attempt in range(2):
        moment = Moment(iteration=1, attempt=attempt)
        writer.put("run", linear_key(), np.full((4, 4), attempt, "f4"), "float32", moment)
    writer.close()
    assert capd("cp", root / "run.zarr", tmp_path / "new.zarr", "--attempt", "latest").code == 0
    [series] = reader.open(tmp_path / "new.zarr").find(attempt="all")
    assert [record.attempt for record in series.records] == [1]


def test_a_run_is_thinned_out_by_a_copy_of_some_iterations(capd: Capd, source: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.zarr"
    told = capd("cp", source, new, "--iterations", "0-:2", "--json").json
    assert (told["series"], told["records"]) == (3, 6)
    copied, before = content(new), content(source)
    assert copied == {path: [records[0], records[2]] for path, records in before.items()}
    assert told["raw_bytes"] == sum(one.raw_bytes for one in reader.open(new).everything())
    assert capd("verify", new).code == 0
    done = capd("cp", source, tmp_path / "none.zarr", "--iterations", "7-")
    assert (done.code, "no record is of iterations 7-" in done.err) == (5, True)
    done = capd("cp", source, tmp_path / "none.zarr", "--iterations", "2-1")
    assert (done.code, "range '2-1' is empty" in done.err) == (2, True)


def test_the_copy_of_a_run_is_continued_like_any_run(capd: Capd, source: Path, tmp_path: Path) -> None:
    assert capd("cp", source, tmp_path / "new.zarr").code == 0
    writer = StoreWriter(tmp_path)
    writer._sequence = 100
    writer.put("new", linear_key(), np.ones((16, 16), "f4"), "float32", Moment(iteration=9))
    writer.close()
    assert sum(map(len, reader.open(tmp_path / "new.zarr").everything())) == 10
    assert capd("verify", tmp_path / "new.zarr").code == 0


def test_what_cannot_be_copied_is_refused(capd: Capd, source: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.zarr"
    (tmp_path / "directory").mkdir()
    assert capd("cp", tmp_path / "directory", new).code == 1
    assert capd("cp", source, tmp_path / "new").code == 2
    assert capd("cp", source, new, "--series", "nothing*").code == 5
    assert capd("cp", source, new, "--recode", "snappy").code == 2
    assert capd("cp", source, new, "--attempt", "some").code == 2
    new.mkdir()
    done = capd("cp", source, new)
    assert done.code == 2
    assert "exists already" in done.err
    assert list(new.iterdir()) == []


def test_a_link_in_the_source_is_refused(capd: Capd, tmp_path: Path) -> None:
    run = fill(tmp_path / "store")
    (run / "link").symlink_to("/etc/passwd")
    done = capd("cp", run, tmp_path / "new.zarr")
    assert done.code == 1
    assert "not a regular file" in done.err
    assert not (tmp_path / "new.zarr").exists()


def test_a_damaged_source_gives_no_copy(capd: Capd, tmp_path: Path) -> None:
    run = fill(tmp_path / "store")
    [shard] = run.glob("*/*/*/*/*weight/data/c/0/0/0")
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        file.write(b"\0\1\2\3")
    for options, code in ((), 1), (("--series", "*weight"), 4):
        done = capd("cp", run, tmp_path / "new.zarr", *options)
        assert done.code == code, done.err
        assert "capd verify" in done.err
        assert not (tmp_path / "new.zarr").exists()
        for path in sorted(hidden(tmp_path / "new.zarr").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


def test_another_order_does_not_continue_a_killed_copy(source: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.zarr"
    assert run_capd("cp", source, new, CAPD_FAILPOINTS="copy.after_files=kill").code == -signal.SIGKILL
    done = run_capd("cp", source, new, "--stats-only")
    assert done.code == 2
    assert "begun with other sources or options" in done.err


@pytest.mark.parametrize(
    ("step", "turn"),
    rows(
        [(step, 1) for step in FILE_STEPS] + [("copy.before_rename", 3), ("copy.after_file", 9)],
        [("copy.after_file", 9), ("copy.after_publish", 1)],
    ),
)
def test_a_copy_killed_at_any_step_is_invisible_and_the_next_call_completes_it(
    source: Path, tmp_path: Path, step: str, turn: int
) -> None:
    _kill_and_continue(source, tmp_path / "new.zarr", step, turn, ())


@pytest.mark.parametrize("step", rows(RECORD_STEPS, ["commit.after_write", "copy.after_series"]))
def test_a_copy_of_records_killed_at_any_step_is_completed_without_a_record_twice(
    source: Path, tmp_path: Path, step: str
) -> None:
    _kill_and_continue(source, tmp_path / "new.zarr", step, 1, ("--series", "*"))


def _kill_and_continue(source: Path, new: Path, step: str, turn: int, options: tuple[str, ...]) -> None:
    killed = run_capd("cp", source, new, *options, CAPD_FAILPOINTS=f"{step}=kill@{turn}")
    assert killed.code == -signal.SIGKILL, f"{step} was not reached: {killed.err}"
    assert new.exists() == (step == "copy.after_publish")
    done = run_capd("cp", source, new, *options)
    assert done.code == 0, done.err
    assert_copied(source, new)
    assert run_capd("verify", new).code == 0


def test_a_run_in_a_store_that_a_daemon_owns_is_copied_record_by_record(
    tmp_path: Path, runtime_dir: Path
) -> None:
    run = fill(tmp_path / "store")
    with daemons() as made:
        made.append(DaemonProcess(tmp_path / "store", runtime_dir / "s.sock", "--node", "node0"))
        done = run_capd("cp", run, tmp_path / "new.zarr", "--json")
    assert done.code == 0, done.err
    assert done.json["files"] == 0
    assert_copied(run, tmp_path / "new.zarr")


def test_a_full_disk_ends_with_its_own_code(source: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.zarr"
    done = run_capd("cp", source, new, "--series", "*", CAPD_FAILPOINTS="commit.before_write=enospc")
    assert done.code == 6
    assert not new.exists()
    assert run_capd("cp", source, new, "--series", "*").code == 0
    assert_copied(source, new)
    assert os.listdir(tmp_path) == ["new.zarr"]


@pytest.mark.parametrize("options", [(), ("--series", "*")], ids=["files", "records"])
def test_a_copy_into_a_run_is_refused(capd: Capd, source: Path, options: tuple[str, ...]) -> None:
    before = sorted(source.rglob("*"))
    done = capd("cp", source, source / "bf16" / "new.zarr", *options)
    assert done.code == 2
    assert "give a path outside of it" in done.err
    assert sorted(source.rglob("*")) == before


def test_a_hidden_directory_of_another_origin_is_neither_used_nor_removed(
    capd: Capd, source: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new.zarr"
    hidden(new).mkdir()
    (hidden(new) / "precious").write_text("kept")
    done = capd("cp", source, new)
    assert done.code == 2
    assert "not of a copy" in done.err
    assert [path.name for path in hidden(new).iterdir()] == ["precious"]

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    hidden(tmp_path / "other.zarr").symlink_to(elsewhere)
    done = capd("cp", source, tmp_path / "other.zarr")
    assert done.code == 2
    assert "is a link" in done.err
    assert list(elsewhere.iterdir()) == []


def test_a_directory_that_took_the_place_of_a_killed_copy_is_not_called_complete(
    capd: Capd, source: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new.zarr"
    assert run_capd("cp", source, new, CAPD_FAILPOINTS="copy.before_rename=kill").code == -signal.SIGKILL
    shutil.rmtree(hidden(new) / new.name)
    new.mkdir()
    done = capd("cp", source, new)
    assert done.code == 2
    assert "exists already" in done.err
    assert list(new.iterdir()) == []


def test_a_copy_of_records_without_a_known_client_is_begun_again_after_a_kill(tmp_path: Path) -> None:
    """They came from shards that lost a COMMIT. Nothing tells which of them the killed command has copied."""
    writer = StoreWriter(tmp_path / "store")
    writer.client = bytes(16)
    for name in ("input", "weight"):
        for step in range(3):
            writer._sequence = 0
            bits = RNG.normal(size=(16, 16)).astype("f4")
            writer.put("run", linear_key(tensor_name=name), bits, "float32", Moment(iteration=step))
    run, new = writer.close() / "run.zarr", tmp_path / "new.zarr"
    killed = run_capd("cp", run, new, "--series", "*", CAPD_FAILPOINTS="copy.after_series=kill")
    assert killed.code == -signal.SIGKILL

    done = run_capd("cp", run, new, "--series", "*")
    assert done.code == 1
    assert f"delete {hidden(new)}, and give the command again" in done.err
    shutil.rmtree(hidden(new))
    assert run_capd("cp", run, new, "--series", "*").code == 0
    assert content(new) == content(run)
