"""`capd serve --detach`: the daemon continues in its own process, and the command ends when the daemon listens."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from capd.cli.output import note
from capd.config import DaemonSettings
from capd.errors import ConfigError, StoreError
from capd.server.daemon import node_name
from capd.server.net.daemon_client import wait_until_ready
from capd.server.net.endpoint import endpoint_path

__all__ = ["go_on_detached"]

READY_S = 60.0
_MAX_SAID_NBYTES = 1 << 16


def go_on_detached(settings: DaemonSettings) -> None:
    """Return in a new process without a parent, in its own session. Its messages go to a log in the store.

    The caller's process ends here. Its exit code is 0 when a daemon answers at the endpoint. Otherwise it is the new
    process's exit code, and the new process's messages are printed. The new process holds none of the caller's
    streams, because a reader of such a stream would wait for the daemon's end. Call this before any thread is started.

    Raises:
        StoreError: If the log cannot be written.
        ConfigError: If a service manager passed a socket, which is for the caller's process alone.
    """
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        raise ConfigError("--detach cannot keep the socket of a service manager; leave it out of the unit")
    path = endpoint_path(settings.endpoint)
    log, known_nbytes = _open_log(Path(settings.store), node_name(settings.node))
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor, stream in ((nothing, 0), (nothing, 1), (log, 2)):
            os.dup2(descriptor, stream)
        os.close(nothing)
        os.close(log)
        return
    statuses: list[int] = []

    def ended() -> bool:
        done, status = os.waitpid(pid, os.WNOHANG)
        statuses.extend([status] if done else [])
        return bool(done)

    problem = wait_until_ready(path, ended, READY_S)
    if statuses:
        os.write(2, os.pread(log, _MAX_SAID_NBYTES, known_nbytes))
        os._exit(_code_of_ended(statuses[0]))
    if problem is not None:
        note(f"the daemon (pid {pid}) is not ready after {READY_S:.0f} s: {problem}")
    os._exit(0 if problem is None else 1)


def _code_of_ended(status: int) -> int:
    """Return the exit code for a daemon that ended before it answered. It is never 0, which means a listening one."""
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        note("the daemon was stopped before it answered")
        return 1
    return code if code > 0 else 128 - code


def _open_log(store: Path, node: str) -> tuple[int, int]:
    log = store / f".capd-{node}.log"
    try:
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(log, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StoreError(f"cannot write {log}: {error.strerror or error}; choose another --store") from error
    return file, os.fstat(file).st_size
