"""What a rank has copied into its arena outlives it, however it ends: committed once, bit for bit, by its daemon."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from capd.server.process import how_ended
from tests.kit import forking
from tests.kit.checking import assert_balanced, captured_numbers
from tests.kit.paths import REPOSITORY
from tests.kit.processes import Daemon, StartRank, at_rest, capd, live_stats, until
from tests.kit.tiers import rows

JOB = str(Path(__file__).with_name("ending_job.py"))
ROOT = str(REPOSITORY)
CAPTURES = 24


def noted(notes: Path) -> list[int]:
    """The captures that had returned before the rank ended."""
    return [int(line) for line in notes.read_text().splitlines()]


def rest(daemon: Daemon) -> dict[str, Any]:
    """The counters once every rank is gone and accounted for."""
    until(lambda: (s := live_stats(daemon.endpoint)["sessions"]) and all(map(at_rest, s)))
    return live_stats(daemon.endpoint)


def ending(daemon: Daemon, notes: Path, how: str, count: int = CAPTURES) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "CAPD_ENDPOINT": daemon.endpoint,
        "CAPD_RUN_ID": "run",
        "CAPD_ARENA_BYTES": str(32 << 20),
        "PYTHONPATH": ROOT,
        "RANK": "0",
    }
    return forking.popen([sys.executable, JOB, str(count), how, str(notes)], env=environment)


@pytest.mark.parametrize("count", rows([1, CAPTURES], [CAPTURES]))
def test_a_script_that_ends_by_os_exit_keeps_all_that_it_captured(count: int, tmp_path: Path) -> None:
    notes, store = tmp_path / "notes", tmp_path / "store"
    command = (sys.executable, JOB, str(count), "exit", str(notes))
    run = ("run", "--store", str(store), "--run-id", "run", "--", *command)
    done = capd(*run, inner=forking.TORCH, PYTHONPATH=ROOT, RANK="0")

    assert noted(notes) == list(range(count))
    assert captured_numbers(store / "run.zarr", 0) == noted(notes)
    assert f"offered {count}, committed {count}, dropped 0" in done.stderr
    assert "killed" not in done.stderr


def kernel_tells() -> bool:
    """Whether the kernel says of a process that is no child how it ended (Linux 6.15)."""
    process = subprocess.Popen(["true"])
    handle = os.pidfd_open(process.pid)
    process.wait()
    with contextlib.closing(os.fdopen(handle)):
        return bool(how_ended(handle))


@pytest.mark.skipif(not kernel_tells(), reason="the kernel tells how others ended since Linux 6.15")
def test_a_killed_rank_and_one_that_ended_by_itself_are_told_apart(tmp_path: Path) -> None:
    for how, end in (("kill", "SIGKILL"), ("exit", "exit code 0")):
        store = tmp_path / how
        command = (sys.executable, JOB, "3", how, str(tmp_path / f"{how}.notes"))
        run = ("run", "--store", str(store), "--run-id", "run", "--", *command)
        done = capd(*run, check=False, inner=forking.TORCH, PYTHONPATH=ROOT, RANK="5")
        stats = capd("stats", str(store / "run.zarr"))
        [session] = json.loads(capd("stats", str(store / "run.zarr"), "--json").stdout)["sessions"]

        assert ("rank 5 was killed by SIGKILL" in done.stderr) == (how == "kill")
        assert f"died ({end})" in stats.stdout
        assert (session["state"], session["end"]) == ("died", end)


@pytest.mark.parametrize(
    ("how", "end"),
    rows(
        [("exit", "exit code 0"), ("abort", "SIGABRT"), ("kill", "SIGKILL"), ("exec", "exit code 0")],
        [("kill", "SIGKILL")],
    ),
)
def test_a_rank_that_the_daemon_never_heard_of_in_time_keeps_all_that_it_captured(
    how: str, end: str, daemon: Daemon, tmp_path: Path
) -> None:
    """The daemon stands still while the rank lives: it accepts a connection whose process is gone already."""
    daemon.send(signal.SIGSTOP)
    process = ending(daemon, tmp_path / "notes", how)
    process.wait(60)
    daemon.send(signal.SIGCONT)

    stats = rest(daemon)
    said = daemon.stop()
    assert noted(tmp_path / "notes") == list(range(CAPTURES))
    assert captured_numbers(daemon.store / "run.zarr", 0) == noted(tmp_path / "notes")
    assert (stats["offered"], stats["committed"], stats["dropped"]) == (CAPTURES, CAPTURES, {})
    told = f" ({end})" if kernel_tells() else ""
    assert f"ended without saying goodbye{told}; {CAPTURES} captures were recovered from its arena" in said


@pytest.mark.slow
def test_a_daemon_that_is_stopped_takes_the_arena_of_a_rank_that_was_faster(
    daemon: Daemon, tmp_path: Path
) -> None:
    daemon.send(signal.SIGSTOP)
    ending(daemon, tmp_path / "notes", "exit").wait(60)
    daemon.send(signal.SIGTERM)
    daemon.send(signal.SIGCONT)

    assert daemon.process is not None
    assert daemon.process.wait(60) == 0
    assert captured_numbers(daemon.store / "run.zarr", 0) == list(range(CAPTURES))
    [session] = json.loads(capd("stats", str(daemon.store / "run.zarr"), "--json").stdout)["sessions"]
    assert (session["state"], session["committed"]) == ("died", CAPTURES)


def test_what_was_sent_and_what_was_not_come_together_once_and_in_order(
    daemon: Daemon, start_rank: StartRank
) -> None:
    rank = start_rank()
    rank.ask("capture 0 40")
    assert rank.ask("flush")
    daemon.send(signal.SIGSTOP)
    rank.ask("capture 40 80")  # sent, as far as the socket takes it, and not read
    rank.kill()
    daemon.send(signal.SIGCONT)

    stats = rest(daemon)
    daemon.stop()
    assert captured_numbers(daemon.store / "run.zarr", 0) == list(range(80))
    assert (stats["committed"], stats["dropped"]) == (80, {})
    for series in _series(daemon.store / "run.zarr"):
        moments = [record.iteration for record in series.records]
        assert moments == sorted(moments)


@pytest.mark.slow
def test_the_next_daemon_takes_what_a_rank_kept_for_it(daemon: Daemon, start_rank: StartRank) -> None:
    rank = start_rank()
    rank.ask("capture 0 10")
    assert rank.ask("flush")
    daemon.kill()
    rank.ask("capture 10 30")
    daemon.start()
    # Not "live": so says what the first daemon left in the catalog, too.
    until(lambda: any(s["connected"] for s in live_stats(daemon.endpoint)["sessions"]))
    daemon.send(signal.SIGSTOP)
    rank.ask("capture 30 50")
    rank.kill()
    daemon.send(signal.SIGCONT)

    stats = rest(daemon)
    daemon.stop()
    assert captured_numbers(daemon.store / "run.zarr", 0) == list(range(50))
    assert_balanced(stats)


def test_a_rank_that_may_not_wait_for_its_daemon_leaves_its_captures_to_it(
    daemon: Daemon, start_rank: StartRank
) -> None:
    rank = start_rank(CAPD_EXIT_TIMEOUT_S="0.1")
    rank.ask("capture 0 4")
    assert rank.ask("flush")
    daemon.send(signal.SIGSTOP)
    rank.ask("capture 4 24")
    rank.leave()
    daemon.send(signal.SIGCONT)

    stats = rest(daemon)
    daemon.stop()
    assert captured_numbers(daemon.store / "run.zarr", 0) == list(range(24))
    assert (stats["committed"], stats["dropped"]) == (24, {})


KINDS_JOB = """
import os, sys
import torch
import capd_client

child = os.fork() if sys.argv[1] == "fork" else 1
if child == 0:  # made before the session, so that it holds nothing of it
    os._exit(0)
capd_client.capture(torch.arange(6.).reshape(2, 3).t(), tensor_name="turned")
capd_client.capture(torch.arange(512.), tensor_name="told", metadata={"text": "x" * 3000})
capd_client.capture(torch.empty(0, 7), tensor_name="empty")
capd_client.capture(torch.arange(9, dtype=torch.int64), tensor_name="whole", layer=2)
if sys.argv[1] == "fork" and os.fork() == 0:  # holds what it can of the parent
    sys.stdout.close()
    os.execv("/bin/sleep", ["sleep", "600"])
print(os.getpid(), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("fork", rows(["alone", "fork"], ["fork"]))
def test_every_kind_of_capture_is_recovered(fork: str, daemon: Daemon, tmp_path: Path) -> None:
    environment = {**os.environ, "CAPD_ENDPOINT": daemon.endpoint, "CAPD_RUN_ID": "run", "PYTHONPATH": ROOT}
    daemon.send(signal.SIGSTOP)
    process = forking.popen([sys.executable, "-c", KINDS_JOB, fork], env=environment, start_new_session=True)
    try:
        process.wait(60)
        daemon.send(signal.SIGCONT)
        stats = rest(daemon)
    finally:
        _end_group(process.pid)
    daemon.stop()

    assert (stats["committed"], stats["dropped"]) == (4, {})
    held = {series.key.tensor_name: series for series in _series(daemon.store / "run.zarr")}
    assert held["turned"].torch(0).tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert held["told"].records[0].metadata == {"text": "x" * 3000}
    assert tuple(held["empty"].records[0].shape) == (0, 7)
    assert held["whole"].torch(0).tolist() == list(range(9))
    assert held["whole"].key.layer == 2


def _end_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _series(run: Path) -> list[Any]:
    import capd as reader

    return list(reader.open(run).find())
