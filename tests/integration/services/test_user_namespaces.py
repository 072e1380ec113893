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

# Says what the daemon answers to a rank.
PEER = """
import sys
from pathlib import Path
from tests.kit.daemon import Rank
rank = Rank(Path(sys.argv[1]))
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
    serve = [sys.executable, "-m", "capd", "serve", "--store", str(tmp_path / "store"), "--endpoint", f"unix:{path}"]
    with log.open("wb") as stderr:
        # In it, this user is uid 0 and no other exists.
        daemon = subprocess.Popen(["unshare", "-U", "--map-users=0,0,1", *serve], stderr=stderr)
    try:
        wait_for(lambda: "listening on" in log.read_text() or daemon.poll() is not None, "the daemon")
        assert daemon.poll() is None, log.read_text()

        os.chmod(runtime_dir, 0o755)
        os.chmod(path, 0o666)
        own = Rank(path)
        assert isinstance(own.open(), Welcome)
        own.close()
        done = as_user(1000, path)
        assert done.startswith("Reject the kernel reports uid 65534 for you, because your uid has no mapping"), done
        assert "/proc/self/uid_map: 0 0 1" in done
        assert "--allow-uid" not in done
        assert "sent away pid" in log.read_text()
    finally:
        daemon.terminate()
        assert daemon.wait(60) == 0


def as_user(uid: int, path: Path, *prefix: str) -> str:
    """What a rank of another user is told."""
    command = [*prefix, sys.executable, "-c", PEER, str(path)]
    done = subprocess.run(command, user=uid, capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_rank_in_a_user_namespace_hears_of_its_mapping(tmp_path: Path, runtime_dir: Path) -> None:
    path = runtime_dir / "s.sock"
    with daemons() as made:
        made.append(DaemonProcess(tmp_path / "store", path, "--allow-uid", "1001"))
        os.chmod(runtime_dir, 0o755)
        # It is uid 0 in there, and 1000 outside.
        told = as_user(1000, path, "unshare", "-U", "-r")
        assert told.startswith("Reject uid 1000 may not connect to this daemon, which allows uid 0, 1001")
        assert "another user namespace (uid_map: 0 1000 1)" in told
        assert as_user(1001, path, "unshare", "-U", "-r").startswith("Welcome")
        assert made[0].stop() == 0


def test_the_uid_of_everybody_is_not_put_on_the_list(tmp_path: Path, runtime_dir: Path) -> None:
    serve = [sys.executable, "-m", "capd", "serve", "--store", str(tmp_path / "store"), "--allow-uid", "65534"]
    done = subprocess.run(["unshare", "-U", "-r", *serve], capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert "would admit every user without a mapping" in line
