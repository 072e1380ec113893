"""Ranks and daemons in different user namespaces: a real `unshare`, and what the refused side is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from capd_client.protocol.messages import Welcome
from tests.kit.daemon import DaemonProcess, Rank, daemons, wait_for
from tests.kit.paths import REPOSITORY

# Says what the daemon answers to a rank of another user, in a user namespace of its own or not. The interpreter may lie
# where only root can read, so it becomes that user when it has imported everything.
PEER = """
import ctypes, os, sys
from pathlib import Path
from tests.kit.daemon import Rank
path, uid, namespace = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.setgroups([])
os.setresuid(uid, uid, uid)
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: its files in /proc are its own again
if namespace:
    assert libc.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWUSER
    Path("/proc/self/uid_map").write_text(namespace)
rank = Rank(path)
answer = rank.open()
print(type(answer).__name__, getattr(answer, "message", ""))
"""


def why_not() -> str:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "mapping uids needs root and unshare"
    done = subprocess.run(["unshare", "-U", "true"], capture_output=True, text=True)
    return f"no user namespaces here: {done.stderr.strip()}" if done.returncode else ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def test_a_daemon_in_a_user_namespace_refuses_whom_it_cannot_name(tmp_path: Path, runtime_dir: Path) -> None:
    """Every peer from outside of its map looks like uid 65534 to it."""
    log, path = runtime_dir / "log", runtime_dir / "s.sock"
    serve = [
        sys.executable,
        "-m",
        "capd",
        "serve",
        "--store",
        str(tmp_path / "store"),
        "--endpoint",
        f"unix:{path}",
    ]
    with log.open("wb") as stderr:
        # In it, this user is uid 0 and no other exists.
        daemon = subprocess.Popen(["unshare", "-U", "-r", *serve], stderr=stderr)
    try:
        wait_for(lambda: "listening on" in log.read_text() or daemon.poll() is not None, "the daemon")
        assert daemon.poll() is None, log.read_text()

        runtime_dir.chmod(0o711)
        path.chmod(0o666)
        own = Rank(path)
        assert isinstance(own.open(), Welcome)
        own.close()
        done = as_user(1000, path)
        assert done.startswith(
            "Reject the kernel reports uid 65534 for you, because your uid has no mapping"
        ), done
        assert "/proc/self/uid_map: 0 0 1" in done
        assert "--allow-uid" not in done
        assert "sent away pid" in log.read_text()
    finally:
        daemon.terminate()
        assert daemon.wait(60) == 0


def as_user(uid: int, path: Path, uid_map: str = "") -> str:
    """What a rank of another user is told, in a user namespace with `uid_map` if one is given."""
    command = [sys.executable, "-c", PEER, str(path), str(uid), uid_map]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_rank_in_a_user_namespace_hears_of_its_mapping(tmp_path: Path, runtime_dir: Path) -> None:
    path = runtime_dir / "s.sock"
    with daemons() as made:
        made.append(DaemonProcess(tmp_path / "store", path, "--allow-uid", "1001"))
        runtime_dir.chmod(0o711)
        # It is uid 0 in there, and 1000 outside.
        told = as_user(1000, path, "0 1000 1")
        assert told.startswith("Reject uid 1000 may not connect to this daemon, which allows uid 0, 1001")
        assert "another user namespace (uid_map: 0 1000 1)" in told
        assert as_user(1001, path, "0 1001 1").startswith("Welcome")
        assert made[0].stop() == 0


@pytest.mark.slow
def test_the_uid_of_everybody_is_not_put_on_the_list(tmp_path: Path, runtime_dir: Path) -> None:
    serve = [
        sys.executable,
        "-m",
        "capd",
        "serve",
        "--store",
        str(tmp_path / "store"),
        "--allow-uid",
        "65534",
    ]
    done = subprocess.run(["unshare", "-U", "-r", *serve], capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert "would admit every user without a mapping" in line
