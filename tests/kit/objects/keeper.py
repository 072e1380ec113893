"""The server that all processes of a test run share: a process that runs it until none of them holds the lock.

    python -m tests.kit.objects.keeper DIRECTORY

A user holds a shared lock on DIRECTORY/users. The lock goes with its process, so a killed one counts no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.kit.objects.server import S3Server
from tests.kit.objects.service import S3Service
from tests.kit.paths import REPOSITORY

__all__ = ["shared_server"]

_LOOK_S = 0.2
_STOP_S = 20.0


@contextlib.contextmanager
def shared_server(directory: Path) -> Iterator[S3Service]:
    """The server of all that name this directory. The first one starts it, the last one ends it."""
    directory.mkdir(parents=True, exist_ok=True)
    address = directory / "address"
    with (directory / "users").open("ab+") as users:
        with _alone(directory):
            # A lock of the process, not of the descriptor: a forked child must not keep the server.
            fcntl.lockf(users, fcntl.LOCK_SH)
            if not address.exists():
                _start(directory)
            endpoint, keeper = address.read_text().split()
        yield S3Service(endpoint)
        with _alone(directory):
            fcntl.lockf(users, fcntl.LOCK_UN)
            with contextlib.suppress(BlockingIOError):
                fcntl.lockf(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end(int(keeper))
                address.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    with (directory / "lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def _start(directory: Path) -> None:
    command = [sys.executable, "-m", "tests.kit.objects.keeper", str(directory)]
    done = subprocess.run(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, timeout=120, check=False)
    log = directory / "keeper.log"
    assert done.returncode == 0, f"no S3 server: {log.read_text() if log.exists() else 'see above'}"


def _end(keeper: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(keeper, signal.SIGTERM)
        until = time.monotonic() + _STOP_S
        while time.monotonic() < until:
            os.kill(keeper, 0)
            time.sleep(0.01)


def _keep(directory: Path, ready: int) -> None:
    """Run the server until nobody uses it, or SIGTERM comes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = S3Server(Path(tempfile.mkdtemp(prefix="capd-s3-", dir="/tmp")))
    users = os.open(directory / "users", os.O_RDWR | os.O_CREAT, 0o600)  # open, and so locked, until the end
    try:
        server.start()
        made = directory / "address.new"
        made.write_text(f"{server.endpoint} {os.getpid()}")
        made.rename(directory / "address")
        os.write(ready, b"1")
        os.close(ready)
        while not _is_unused(users):
            time.sleep(_LOOK_S)
    finally:
        server.discard()
        (directory / "address").unlink(missing_ok=True)


def _is_unused(users: int) -> bool:
    try:
        fcntl.lockf(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main() -> int:
    """Leave the keeper in a session of its own and return once the server is ready."""
    directory = Path(sys.argv[1])
    ready, mine = os.pipe()
    if os.fork():
        os.close(mine)
        return 0 if os.read(ready, 1) else 1
    os.close(ready)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C ends the users first
    with (directory / "keeper.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    _keep(directory, mine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
