"""The ends of a daemon that nobody sends a signal: `capd ctl shutdown` and `capd serve --once`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.daemon import DaemonProcess, Rank, daemons, stored_payloads
from tests.kit.paths import REPOSITORY
from tests.kit.processes import capd

# Asks for the end as another user. The interpreter may lie where only root can read, so it imports everything before.
OTHER_USER = """
import os, sys
from pathlib import Path
from capd.server.net.daemon_client import connect
from capd_client.protocol.control import Control
os.setgroups([])
os.setresuid(1001, 1001, 1001)
for wait_s in (0.0, 60.0):
    with connect(Path(sys.argv[1])) as tool:
        reply = tool.control(Control("shutdown", wait_s=wait_s), 60)
        print(reply.code, reply.message)
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def rank(runtime_dir: Path) -> Iterator[Rank]:
    made = Rank(runtime_dir / "s.sock")
    yield made
    made.close()


def test_shutdown_returns_when_everything_is_sealed_and_the_next_daemon_can_start(
    store: Path, runtime_dir: Path, rank: Rank
) -> None:
    with daemons() as made:
        made.append(DaemonProcess(store, rank.path))
        rank.connect()
        rank.put(1, 2)
        rank.expect_acks(1, 2)

        done = capd("ctl", "shutdown", "--endpoint", f"unix:{rank.path}")
        assert done.stdout == "the daemon stopped, everything is sealed\n"
        assert made[0].process.wait(30) == 0
        assert "stopping (a tool)" in made[0].text()
        assert len(stored_payloads(store / "run.zarr")) == 2

        made.append(DaemonProcess(store, rank.path))
        assert made[1].stop() == 0


def test_shutdown_of_a_daemon_that_is_not_there_is_exit_code_3(runtime_dir: Path) -> None:
    done = capd("ctl", "shutdown", "--endpoint", f"unix:{runtime_dir / 'none'}", check=False)

    assert done.returncode == 3
    assert "no daemon at" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_daemon_does_not_end_it(store: Path, runtime_dir: Path) -> None:
    with daemons() as made:
        made.append(DaemonProcess(store, runtime_dir / "s.sock", "--allow-uid", "1001"))
        runtime_dir.chmod(0o711)
        done = subprocess.run(
            [sys.executable, "-c", OTHER_USER, str(runtime_dir / "s.sock")],
            capture_output=True, text=True, timeout=120, cwd=REPOSITORY,
        )  # fmt: skip

        refused = "failed uid 1001 may not end this daemon of uid 0; ask uid 0, or whoever runs its service"
        assert done.stdout.splitlines() == [refused, refused], done.stderr
        assert made[0].stats()["runs"] == []
        assert made[0].stop() == 0
        assert "stopping (SIGTERM)" in made[0].text()


@pytest.mark.slow
def test_shutdown_names_the_records_that_are_left_unsealed(
    store: Path, runtime_dir: Path, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPD_FAILPOINTS", "seal.before_index=hang")
    monkeypatch.setenv("CAPD_SHUTDOWN_TIMEOUT_S", "1")
    with daemons() as made:
        made.append(DaemonProcess(store, rank.path))
        rank.connect()
        rank.put(1)
        rank.expect_acks(1)

        done = capd("ctl", "shutdown", "--endpoint", f"unix:{rank.path}", check=False)
        assert done.returncode == 1
        assert "Nothing is lost: `capd serve --store" in done.stderr
        assert made[0].process.wait(30) == 8


def test_once_ends_after_the_last_rank_and_not_before_the_first(
    store: Path, runtime_dir: Path, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPD_IDLE_SEAL_S", "0.3")
    with daemons() as made:
        made.append(DaemonProcess(store, rank.path, "--once"))
        # Tools are no ranks.
        assert made[0].stats()["runs"] == []
        rank.connect()
        rank.put(1)
        rank.expect_acks(1)
        rank.bye()
        rank.disconnect()

        assert made[0].process.wait(30) == 0
        assert "the last rank has been gone for 0.3 s" in made[0].text()
        assert len(stored_payloads(store / "run.zarr")) == 1
