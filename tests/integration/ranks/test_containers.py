"""Rank and daemon in containers of their own: other pid, mount, network, IPC and user namespaces; other users."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.checking import assert_balanced, captured_numbers
from tests.kit.launching import can_unshare
from tests.kit.processes import RANK_JOB, Daemon, Rank, at_rest, live_stats, until

APART = ("--pid", "--fork", "--mount-proc", "--mount", "--ipc", "--uts", "--net", "--kill-child")
NOBODY = 65534
AS_NOBODY = f"""
import os, torch, capd_client.api
from tests.kit import content
from tests.kit.jobs import rank_job
content.tensor(0, 0)
os.setgid({NOBODY})
os.setuid({NOBODY})
rank_job.main()
"""  # what is imported by then, the other user need not be able to read


apart = pytest.mark.skipif(not can_unshare(*APART), reason="namespaces may not be made here (needs root)")


def signal_inside(pid: int, signum: int) -> None:
    """Signal the process that `unshare` (of this pid) has started."""
    [inside] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(inside), signum)


def only_session(daemon: Daemon) -> dict[str, Any]:
    [session] = live_stats(daemon.endpoint)["sessions"]
    return dict(session)


def dead_session(daemon: Daemon) -> dict[str, Any]:
    """The only session, once its rank's death is seen and the outcome of all that it had sent is known."""
    until(lambda: at_rest(only_session(daemon)))
    session = only_session(daemon)
    assert session["state"] == "died"
    return session


@contextlib.contextmanager
def contained(daemon: Daemon) -> Iterator[Rank]:
    """A rank that is process 1 of its pid namespace, on a host of another name."""
    inside = ("sh", "-c", 'hostname inside; exec "$@"', "sh", sys.executable, str(RANK_JOB))
    # A busy machine may not answer three pings within a second, and the rank is to be connected when it is looked at.
    rank = Rank(daemon.endpoint, command=("unshare", *APART, *inside), CAPD_PING_S="5")
    try:
        yield rank
    finally:
        rank.kill()


@pytest.mark.slow
@apart
def test_a_rank_in_namespaces_of_its_own_is_captured_as_any_other(daemon: Daemon, tmp_path: Path) -> None:
    with contained(daemon) as rank:
        rank.ask("capture 0 40")
        assert rank.ask("flush") is True
        session = only_session(daemon)
        assert (session["pid"], session["host"]) == (1, "inside")
        assert session["connected"]
        rank.leave()
    daemon.stop()
    assert captured_numbers(tmp_path / "store" / "run.zarr", 0) == list(range(40))


@apart
def test_the_death_of_a_rank_whose_pid_means_nothing_here_is_seen_at_once(
    daemon: Daemon, tmp_path: Path
) -> None:
    """And counted exactly; its pid is 1, which is somebody else for the daemon."""
    with contained(daemon) as rank:
        rank.ask("stream 0")
        until(lambda: rank.ask("counters")["committed"] > 20)
        acked = rank.ask("counters")["committed"]
        signal_inside(rank.process.pid, signal.SIGKILL)
        session = dead_session(daemon)
    assert daemon.process is not None
    maps = Path(f"/proc/{daemon.process.pid}/maps")
    until(lambda: "memfd:capd" not in maps.read_text())
    daemon.stop()

    assert_balanced(session)
    assert session["committed"] >= acked
    assert captured_numbers(tmp_path / "store" / "run.zarr", 0) == list(range(session["committed"]))


@pytest.mark.slow
@apart
def test_a_daemon_in_namespaces_of_its_own_serves_ranks_outside(tmp_path: Path, runtime_dir: Path) -> None:
    """The kernel names pid 0 for them: their deaths are seen by their process handles."""
    daemon = Daemon(tmp_path / "store", runtime_dir, prefix=("unshare", *APART))
    try:
        daemon.start()
        rank = Rank(daemon.endpoint)
        try:
            rank.ask("stream 0")
            until(lambda: rank.ask("counters")["committed"] > 20)
            assert "(pid 0)" in daemon.output()
            rank.kill()
            assert_balanced(dead_session(daemon))
        finally:
            rank.kill()
        assert daemon.process is not None
        signal_inside(daemon.process.pid, signal.SIGTERM)
        assert daemon.process.wait(60) == 0, daemon.output()
    finally:
        daemon.discard()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_rank_of_another_user_that_is_allowed_is_captured_as_any_other(tmp_path: Path) -> None:
    """Its memory, its process handle and its death are another user's as well."""
    with tempfile.TemporaryDirectory(prefix="capd-o-", dir="/tmp") as directory:
        os.chmod(directory, 0o711)  # noqa: S103 - the other user must reach the socket
        daemon = Daemon(Path(directory) / "store", Path(directory), "--allow-uid", str(NOBODY))
        daemon.start()
        rank = Rank(daemon.endpoint, command=(sys.executable, "-c", AS_NOBODY))
        try:
            rank.ask("stream 0")
            until(lambda: rank.ask("counters")["committed"] > 20)
            acked = rank.ask("counters")["committed"]
            rank.process.kill()
            session = dead_session(daemon)
            assert_balanced(session)
            assert session["committed"] >= acked
            daemon.stop()
            run = Path(directory) / "store" / "run.zarr"
            assert captured_numbers(run, 0) == list(range(session["committed"]))
        finally:
            rank.kill()
            daemon.discard()
