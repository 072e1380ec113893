"""The daemon that a job starts for itself, with TENSOR_SAVE_ENABLED=true and without CAPD_ENDPOINT.

A node has one such daemon per store. The first rank starts `python -m capd serve --detach` under a lock. The other
ranks find the daemon listening and join. The daemon is no child of the job, so the job neither waits for it nor kills
it. It ends by itself after the rank that started it and all other ranks are gone.

The last rank asks the daemon to seal the run, within the time of the job's exit. A container or batch system may kill
everything after the job, the daemon included.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import msgspec

from capd_client.config.settings import MAX_SOCKET_PATH, ClientConfig, parse_endpoint
from capd_client.errors import ConfigError, EmbeddedError
from capd_client.process.log import RateLimitedLog
from capd_client.process.ranks import job_name, spans_nodes
from capd_client.protocol.control import Control, Stats, StatsReply
from capd_client.protocol.messages import (
    MAX_FRAME_NBYTES,
    TOOL_BYTE,
    ClientMessage,
    DaemonMessage,
    decode_daemon,
    encode,
)

__all__ = ["provide", "settle"]

READY_S = 60.0
_REST_S = 0.05
_REPLY_S = 3.0
# The exit code of a daemon whose store belongs to another daemon.
_OWNED_ELSEWHERE = 7
_MAX_NOTE_NBYTES = 1 << 20
_SOCKET = "capd.sock"
_NO_ANSWER = (OSError, EOFError, msgspec.MsgspecError)


def provide(config: ClientConfig, notices: RateLimitedLog) -> ClientConfig:
    """Return the settings with the endpoint of a daemon that answers. Start one if this node has none on the store.

    The name of the run is filled in if it is not set. If no policy is set, captures wait for room, because
    `tensor_saver` lost none.

    Raises:
        EmbeddedError: No daemon answers, at the latest after READY_S.
    """
    store = str(config.embedded)
    directory = _runtime_directory()
    name = "job-" + hashlib.sha256(os.fsencode(os.path.realpath(store))).hexdigest()[:12]
    path = os.path.join(directory, name, _SOCKET)
    deadline = time.monotonic() + READY_S
    with _locked(os.path.join(directory, f"{name}.lock"), deadline):
        if not _serves(path, store):
            path = _start(store, path, deadline)
    run_id = config.run_id or job_name()
    if run_id is None and spans_nodes():
        notices.warn(
            "nodes",
            "the job spans several nodes and shares no name: each node keeps a run of its own; "
            "set CAPD_RUN_ID=NAME on all of them",
        )
    policy = "block" if config.origins.get("policy") == "default" else config.policy
    notices.info("captures go to %s, through a daemon of the job's own", store)
    return replace(config, endpoint=path, run_id=run_id, policy=policy)


def settle(endpoint: str, run_id: str, timeout_s: float) -> None:
    """Ask the daemon to seal the run of a rank that has left, if no other rank of the run is live.

    Args:
        endpoint: The socket of the daemon.
        run_id: The run.
        timeout_s: The longest time to wait. 0: do nothing.
    """
    if timeout_s <= 0:
        return
    with contextlib.suppress(*_NO_ANSWER), _connected(endpoint) as tool:
        reply = _ask(tool, Stats(run_id), _REPLY_S)
        runs = reply.stats.get("runs", ()) if isinstance(reply, StatsReply) else None
        if runs is None:
            return
        if not any(one.get("state") == "live" for run in runs for one in run.get("sessions", ())):
            _ask(tool, Control("seal", run_id), timeout_s)


def _start(store: str, path: str, deadline: float) -> str:
    """Start a daemon that listens on `path`. Return the socket of the store's daemon, which may be another daemon."""
    if not sys.executable:
        raise EmbeddedError(
            "this Python does not know its own path; start `capd serve` and set CAPD_ENDPOINT"
        )
    command = [sys.executable, "-m", "capd", "serve", "--quiet", "--detach", "--parent", str(os.getpid())]
    command += ["--store", store, "--endpoint", f"unix:{path}"]
    rest_s = 0.5
    while True:
        code = _run(command, max(0.1, deadline - time.monotonic()))
        if code == 0:
            return path
        owner = _owner(store) if code == _OWNED_ELSEWHERE else None
        if owner is not None:
            return owner
        if code != _OWNED_ELSEWHERE or time.monotonic() > deadline:
            break
        # The daemon of an earlier job does not listen any more: it seals its runs and leaves.
        time.sleep(rest_s)
        # Each attempt writes the reason of its end to stderr, so the attempts become rarer.
        rest_s = min(2 * rest_s, 5.0)
    raise EmbeddedError(
        f"no daemon could be started on {store} (exit code {code}; its message is above). Choose another "
        f"TENSOR_SAVE_DIR, install capd for {sys.executable}, or start `capd serve` and set CAPD_ENDPOINT"
    )


def _run(command: list[str], timeout_s: float) -> int:
    try:
        # Errors of its start go to the job's stderr. The terminal's Ctrl-C does not reach a new session.
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise EmbeddedError(
            f"the daemon was not ready after {timeout_s:.0f} s: {' '.join(command)}"
        ) from None
    except OSError as error:
        raise EmbeddedError(f"{command[0]} cannot be executed: {error.strerror or error}") from None
    return done.returncode


def _owner(store: str) -> str | None:
    """Return the socket of the daemon that has the store on this node, by its lock file. None: it does not answer."""
    notes = map(_noted, glob.glob(os.path.join(glob.escape(store), ".capd-*.lock")))
    return next((path for path in notes if path is not None and _serves(path, store)), None)


def _noted(path: str) -> str | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(file, "rb") as note:
            if os.fstat(file).st_uid != os.getuid():
                return None
            line, _, _ = note.read(_MAX_NOTE_NBYTES).partition(b"\n")
        return parse_endpoint(msgspec.json.decode(line, type=_Note).endpoint)
    except (*_NO_ANSWER, ConfigError):
        return None


class _Note(msgspec.Struct):
    endpoint: str = ""


def _serves(path: str, store: str) -> bool:
    """Return whether a daemon answers on `path` and has this store."""
    try:
        with _connected(path) as tool:
            # Without a run: only the facts of the daemon.
            reply = _ask(tool, Stats(""), _REPLY_S)
        here = reply.stats.get("store") if isinstance(reply, StatsReply) else None
        return isinstance(here, str) and os.path.realpath(here) == os.path.realpath(store)
    except _NO_ANSWER:
        return False


@contextlib.contextmanager
def _connected(path: str) -> Iterator[Connection]:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.settimeout(_REPLY_S)
        peer.connect(path)
        peer.settimeout(None)
        peer.sendall(TOOL_BYTE)
        connection = Connection(peer.detach())
    finally:
        peer.close()
    with connection:
        yield connection


def _ask(tool: Connection, message: ClientMessage, timeout_s: float) -> DaemonMessage:
    """Send a message and return the answer. Raises one of _NO_ANSWER without an answer."""
    tool.send_bytes(encode(message))
    if not tool.poll(timeout_s):
        raise TimeoutError
    return decode_daemon(tool.recv_bytes(MAX_FRAME_NBYTES))


@contextlib.contextmanager
def _locked(path: str, deadline: float) -> Iterator[None]:
    """Let the ranks of a node in one at a time. The file stays, because its removal would let two ranks in at once."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EmbeddedError(
                        f"another rank has been starting the daemon for {READY_S:.0f} s: {path}"
                    ) from None
                time.sleep(_REST_S)
        yield
    finally:
        os.close(file)


def _runtime_directory() -> str:
    """Return a directory of this user alone, the same for all ranks of a node, short enough for a socket's path."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [os.path.join(runtime, "capd")] if os.path.isabs(runtime) and os.path.isdir(runtime) else []
    places += [
        os.path.join(place, f"capd-{os.getuid()}")
        for place in (tempfile.gettempdir(), "/tmp")  # noqa: S108 - 0700, checked below
    ]
    problem = ""
    for place in places:
        if len(os.fsencode(os.path.join(place, "job-0123456789ab", _SOCKET))) > MAX_SOCKET_PATH:
            continue
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
            found = os.lstat(place)
        except OSError as error:
            problem = f"{place}: {error.strerror or error}"
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return place
        problem = f"{place} is not a directory of uid {os.getuid()} alone"
    raise EmbeddedError(f"no directory for the daemon's socket ({problem}); set XDG_RUNTIME_DIR")
