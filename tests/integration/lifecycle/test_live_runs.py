"""Removals beside a daemon: never a live run, what it has open is let go, and its own retention."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from capd.lifecycle.inventory import look_at
from capd.lifecycle.trash import entries
from capd.store.read.store import open_store
from capd_client.protocol.messages import Reject
from tests.kit.daemon import DaemonProcess, Rank, daemons, wait_for
from tests.kit.store.cli import run_capd
from tests.kit.store.removing import age, files_below, small_run


@pytest.fixture
def started() -> Iterator[list[DaemonProcess]]:
    with daemons() as made:
        yield made


def serve(
    started: list[DaemonProcess], store: Path, runtime_dir: Path, *options: str, **popen: object
) -> DaemonProcess:
    started.append(DaemonProcess(store, runtime_dir / "capd.sock", *options, **popen))
    return started[-1]


def captured(daemon: DaemonProcess, run_id: str, count: int = 4) -> Rank:
    rank = Rank(daemon.path, run_id=run_id)
    rank.connect()
    rank.count(offered=count)
    rank.put(*range(count))
    rank.expect_acks(*range(count))
    return rank


def test_a_live_run_is_refused_and_captures_go_on(
    started: list[DaemonProcess], tmp_path: Path, runtime_dir: Path
) -> None:
    store = tmp_path / "store"
    daemon = serve(started, store, runtime_dir)
    rank = captured(daemon, "job")
    wait_for(lambda: run_capd("runs", store, "--json").json[0]["state"] == "live", "the run is live")

    words = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    wanted = shlex.join(word.decode() for word in words)[:999]
    wait_for(
        lambda: run_capd("runs", store, "--json").json[0]["command"].startswith(wanted),
        "the command is saved",
    )
    found = run_capd("rm", store / "job.zarr", "--yes")
    assert (found.code, found.out) == (7, "")
    assert "is live (rank 0 is connected), nothing removed; let the job end first" in found.err
    assert len(found.err.splitlines()) == 1
    pruned = run_capd("prune", store, "--max-size", "1", "--yes", "--json")
    assert [(one["keep"], one["reason"]) for one in pruned.json["runs"]] == [(True, "live")]
    assert run_capd("gc", store, "--all", "--yes").code == 0
    rank.put(4, 5)
    rank.expect_acks(4, 5)
    rank.bye()
    assert daemon.stop() == 0
    assert [len(series) for series in open_store(store / "job.zarr").series] == [6]
    rank.close()


def test_a_rank_whose_daemon_was_killed_keeps_its_run(
    started: list[DaemonProcess], tmp_path: Path, runtime_dir: Path
) -> None:
    store = tmp_path / "store"
    daemon = serve(started, store, runtime_dir)
    rank = Rank(daemon.path, run_id="job")
    # As a real rank does, so that its process can be looked for.
    rank.connect(host=os.uname().nodename)
    rank.put(0, 1)
    rank.expect_acks(0, 1)
    daemon.stop(signal.SIGKILL)

    found = run_capd("rm", store / "job.zarr", "--yes")
    assert found.code == 7
    assert f"rank 0 (pid {os.getpid()}) runs, and its daemon does not" in found.err
    assert (store / "job.zarr").exists()
    rank.close()


def test_a_sealed_run_that_a_daemon_has_open_is_let_go_and_the_name_is_free_again(
    started: list[DaemonProcess], tmp_path: Path, runtime_dir: Path
) -> None:
    store = tmp_path / "store"
    daemon = serve(started, store, runtime_dir)
    rank = captured(daemon, "job")
    rank.bye()
    rank.close()
    # Not sealed yet: it is not let go.
    early = run_capd("rm", store / "job.zarr", "--yes")
    assert early.code in (0, 7)
    if early.code:
        assert "is not sealed yet" in early.err or "has ranks" in early.err
        wait_for(lambda: daemon.control("seal", "job").ok, "the run is sealed")
        done = wait_for(
            lambda: (found := run_capd("rm", store / "job.zarr", "--yes")).code == 0 and found,
            "it is removed",
        )
        assert "1 run removed" in done.err
    assert not (store / "job.zarr").exists()

    again = captured(daemon, "job", count=2)
    again.bye()
    again.close()
    assert daemon.stop() == 0
    assert [len(series) for series in open_store(store / "job.zarr").series] == [2]
    assert run_capd("verify", store / "job.zarr").code == 0


def test_a_writer_completes_an_interrupted_removal_and_begins_a_new_run(
    started: list[DaemonProcess], tmp_path: Path, runtime_dir: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    old = small_run(store, "job")
    content = files_below(old)
    killed = run_capd("rm", old, "--yes", CAPD_FAILPOINTS="trash.after_mark=kill")
    assert killed.code == -signal.SIGKILL
    daemon = serve(started, store, runtime_dir)
    rank = captured(daemon, "job", count=3)
    rank.bye()
    rank.close()
    assert daemon.stop() == 0

    assert [len(series) for series in open_store(store / "job.zarr").series] == [3]
    [trashed] = store.glob(".capd/trash/*/job.zarr")
    found = files_below(trashed)
    assert {name for name in content if found.get(name) != content[name]} == {"zarr.json"}


@pytest.mark.slow
def test_a_rank_that_comes_during_a_removal_may_try_again(
    started: list[DaemonProcess], tmp_path: Path, runtime_dir: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    old = small_run(store, "job")
    command = [sys.executable, "-m", "capd", "rm", str(old), "--yes"]
    hang = {**os.environ, "CAPD_FAILPOINTS": "trash.after_mark=hang"}
    with subprocess.Popen(command, env=hang, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as removal:
        wait_for(lambda: look_at(old).state == "removing", "the removal has begun")
        daemon = serve(started, store, runtime_dir)
        rank = Rank(daemon.path, run_id="job")
        answer = rank.open()
        rank.close()
        removal.kill()
    assert isinstance(answer, Reject)
    assert (answer.retry, "is open" in answer.message) == (True, True)

    again = captured(daemon, "job", count=3)
    again.bye()
    again.close()
    assert daemon.stop() == 0
    assert (look_at(old).records, [entry.name for entry in entries(store)]) == (3, ["job.zarr"])
    assert run_capd("verify", old).code == 0


def test_the_daemon_removes_by_retention_with_a_line_for_each_and_never_the_newest(
    started: list[DaemonProcess], tmp_path: Path, runtime_dir: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    one = small_run(store, "a")
    for name, days in (("b", 30), ("c", 20), ("e", 0.01), ("d", 10)):
        shutil.copytree(one, store / f"{name}.zarr")
        age(store / f"{name}.zarr", days)
    age(one, 40)
    assert run_capd("pin", store / "b.zarr").code == 0
    config = tmp_path / "capd.toml"
    # The document of `e` is older than that of `d`, which is the newest run, but a job has just changed it.
    os.utime(store / "e.zarr" / "zarr.json", (0, 0))
    config.write_text("[retention]\nkeep_last = 1\n")
    daemon = serve(started, store, runtime_dir, "--config", str(config))
    wait_for(lambda: daemon.text().count("[retention] moved run") == 2, "two runs are removed")

    assert sorted(path.name for path in store.glob("*.zarr")) == ["b.zarr", "d.zarr", "e.zarr"]
    rank = captured(daemon, "live")
    rank.bye()
    rank.close()
    assert daemon.stop() == 0
    lines = [line for line in daemon.text().splitlines() if "[retention]" in line]
    assert len(lines) == 2
    assert all("no rule keeps it" in line for line in lines)


def test_captures_go_on_while_a_removal_of_the_daemon_hangs_and_the_next_daemon_completes_it(
    started: list[DaemonProcess], tmp_path: Path, runtime_dir: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    age(small_run(store, "old"), 40)
    age(small_run(store, "new"), 1)
    config = tmp_path / "capd.toml"
    config.write_text("[retention]\nkeep_last = 1\n")
    options = ("--config", str(config))
    hang = {**os.environ, "CAPD_FAILPOINTS": "trash.after_mark=hang"}
    daemon = serve(started, store, runtime_dir, *options, env=hang)
    wait_for(lambda: look_at(store / "old.zarr").state == "removing", "the removal has begun")
    rank = captured(daemon, "job", count=8)
    assert daemon.control("seal", "job").ok
    rank.close()
    daemon.stop(signal.SIGKILL)
    assert (store / "old.zarr").exists()

    again = serve(started, store, runtime_dir, *options)
    wait_for(lambda: not (store / "old.zarr").exists(), "the removal is completed")
    wait_for(lambda: not (store / "new.zarr").exists(), "the newest run is the one that was just captured")
    assert again.stop() == 0
    assert [len(series) for series in open_store(store / "job.zarr").series] == [8]


def test_without_retention_the_daemon_removes_nothing(
    started: list[DaemonProcess], tmp_path: Path, runtime_dir: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    age(small_run(store, "a"), 1000)
    daemon = serve(started, store, runtime_dir)
    rank = captured(daemon, "job")
    rank.bye()
    rank.close()
    assert daemon.stop() == 0
    assert (store / "a.zarr").exists()
    assert "[retention]" not in daemon.text()
