"""`capd serve --detach`: back when the daemon listens, with its exit code when it does not."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from capd.server.net.daemon_client import connect
from capd_client.protocol.messages import Ping, Pong
from tests.kit.processes import capd, daemons_on, until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "store"
    for pid in daemons_on(tmp_path / "store"):
        os.kill(pid, signal.SIGKILL)


def test_it_comes_back_when_a_daemon_listens_that_is_nobodys_child(store: Path, runtime_dir: Path) -> None:
    endpoint = f"unix:{runtime_dir / 'capd.sock'}"
    assert capd("serve", "--quiet", "--detach", "--store", str(store), "--endpoint", endpoint).returncode == 0

    (pid,) = daemons_on(store)
    with connect(runtime_dir / "capd.sock") as tool:
        assert isinstance(tool.request(Ping()), Pong)
    assert os.getsid(pid) == pid
    assert f"PPid:\t{os.getpid()}\n" not in Path(f"/proc/{pid}/status").read_text()

    again = capd("serve", "--detach", "--store", str(store), "--endpoint", f"{endpoint}2", check=False)
    assert (again.returncode, "owned by another daemon" in again.stderr) == (7, True)
    streams = {os.path.realpath(f"/proc/{pid}/fd/{stream}") for stream in range(3)}
    (log,) = store.glob(".capd-*.log")
    assert streams == {os.devnull, str(log)}
    os.kill(pid, signal.SIGTERM)
    until(lambda: not daemons_on(store))


def test_a_daemon_that_was_started_for_a_process_that_is_gone_ends_by_itself(
    store: Path, runtime_dir: Path
) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    endpoint = f"unix:{runtime_dir / 'job' / 'capd.sock'}"
    capd(
        "serve",
        "--quiet",
        "--detach",
        "--parent",
        str(process.pid),
        "--store",
        str(store),
        "--endpoint",
        endpoint,
    )

    until(lambda: not daemons_on(store))
    assert not (runtime_dir / "job").exists()


def test_one_that_was_started_for_a_process_that_lives_stays(store: Path, runtime_dir: Path) -> None:
    endpoint = f"unix:{runtime_dir / 'capd.sock'}"
    started_for = subprocess.Popen(["sleep", "600"])
    try:
        capd(
            "serve",
            "--detach",
            "--parent",
            str(started_for.pid),
            "--store",
            str(store),
            "--endpoint",
            endpoint,
        )
        assert len(daemons_on(store)) == 1
        with pytest.raises(AssertionError):
            until(lambda: not daemons_on(store), 4)
    finally:
        started_for.kill()
        started_for.wait()
    until(lambda: not daemons_on(store))
