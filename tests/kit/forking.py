"""Starts the Python jobs of tests by a fork of a process that has imported torch: 0.2 s of CPU time, not 1.7 s.

A job so started is a child of the test process, like any that `subprocess` starts, with its own command line,
environment, directory, descriptors, process group and end. test_forked_jobs.py compares it with a cold one. Use
`subprocess` where the start itself is the subject: the order of imports, start-up files, options of Python, variables
that torch reads when it is imported.

    done = forking.run([sys.executable, "job.py"], capture_output=True, timeout=60)
    done = forking.run([sys.executable, "-m", "capd", "run", "--", sys.executable, "job.py"], inner=forking.TRAINING)
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.kit import fork_server, stand_in

__all__ = ["CAPD", "MARK", "TORCH", "TRAINING", "TRANSFORMERS", "Popen", "popen", "run", "stand_in_for"]

TORCH = "torch"
TRAINING = "torch,torch._dynamo"
"""What a job imports that has an optimizer or compiles."""
TRANSFORMERS = "torch,torch._dynamo,transformers"
CAPD = "google_crc32c,msgspec,numcodecs,numpy,pydantic,typer,zarr"
"""What the daemon imports, and most commands."""

MARK = b"tests/kit/fork_server.py"
"""Part of the command line of every fork server."""

_PROGRAM = str(Path(fork_server.__file__))
_ROOM = "." * 4096  # for the command line of a job
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_START_S = 60.0
_libc = ctypes.CDLL(None, use_errno=True)


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` of `[sys.executable, …]`, forked from a fork server.

    Args:
        args: The command. Its first word is `sys.executable`; `-u`, `-m` and `-c` are known.
        imports: Modules that the fork server has imported: only those that the job would import, too. "" is CAPD for
            `-m capd`, else TORCH.
        options: As of `subprocess.Popen`; no `preexec_fn`, `shell`, `user` and `group`.
    """

    def __init__(self, args: Sequence[Any], *, imports: str = "", **options: Any) -> None:
        self._imports = imports or (CAPD if list(args[1:3]) == ["-m", "capd"] else TORCH)
        super().__init__([os.fspath(word) for word in args], **options)

    def kill(self) -> None:
        """Kill the job and wait for its end.

        A fork of another job makes this process a reaper for a moment. It would inherit the children of a job that
        ends in that moment.
        """
        super().kill()
        if self.returncode is None:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *more: Any) -> None:
        (pass_fds, cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _,
         gid, gids, uid, umask, start_new_session, process_group) = more  # fmt: skip
        unknown = [executable, preexec_fn, gid, gids, uid]
        assert args[0] == sys.executable, f"{args[0]} has no fork server: start it with subprocess"
        assert not any(unknown), "a forked job takes no such option: start it with subprocess"
        assert not shell, "a forked job has no shell: start it with subprocess"
        descriptors = [p2cread, c2pwrite, errwrite]
        environ = {**(os.environ if env is None else env)}
        request = {
            "adopted": True, "arguments": [os.fsdecode(word) for word in args[1:]], "executable": sys.executable,
            "directory": os.getcwd() if cwd is None else os.fsdecode(cwd), "environ": environ,
            "new_session": start_new_session, "group": None if process_group in (-1, None) else process_group,
            "ignored": stand_in.ignored(), "pass_fds": list(pass_fds),
            "umask": stand_in.umask() if umask == -1 else umask,
        }  # fmt: skip
        given = [number if given == -1 else given for number, given in enumerate(descriptors)]
        self.pid = _server(self._imports, environ).fork(request, [*given, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def popen(
    args: Sequence[Any], *, imports: str = "", inner: str = "", **options: Any
) -> subprocess.Popen[Any]:
    """Returns a forked job where that is possible; else the process is started by `subprocess`.

    Args:
        args: The command. It is possible for `[sys.executable, …]`.
        imports: As of `Popen`; "" is what such a command imports.
        inner: Have the Pythons that the command starts forked, too, from a server that has imported these modules: a
            later word `sys.executable`, as of `capd run -- python job.py`, and the ranks of torchrun.
        options: As of `subprocess.Popen`. With `preexec_fn` a fork is not possible.
    """
    if inner:
        environ = {**(options.get("env") or os.environ)}
        python = stand_in_for(environ, imports=inner)
        options["env"] = {**environ, "PYTHON_EXEC": python}
        args = [args[0], *(python if word == sys.executable else word for word in args[1:])]
    if args[0] == sys.executable and not options.get("preexec_fn"):
        return Popen(args, imports=imports, **options)
    return subprocess.Popen(args, **options)


def run(
    args: Sequence[Any], *, input: Any = None, capture_output: bool = False, timeout: float | None = None,  # noqa: A002
    check: bool = False, **options: Any,
) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """`subprocess.run` of a job that is forked where that is possible; the arguments are those of `popen` and `run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with popen(args, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def stand_in_for(environ: Mapping[str, str], *, imports: str = TORCH) -> str:
    """Returns a program to write where another program starts `python`: it has the job forked.

    The job has a session of its own. Signals reach it through the program, which stands in its group, but SIGSTOP.

    Args:
        environ: The job's environment; of it only what torch reads at its import matters.
        imports: As of `Popen`.
    """
    server = _server(imports, environ)
    server.wait()
    return str(server.stand_in)


class _Server:
    """A fork server and the directory of its socket."""

    def __init__(self, imports: str, environ: Mapping[str, str]) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="capd-fork-", dir="/tmp"))
        self._path = self._directory / "socket"
        self._log = self._directory / "log"
        inherited = {
            name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")
        }
        needed = fork_server.import_variables({**environ})
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, _PROGRAM, str(self._path), imports, _ROOM],
                env=inherited | needed, stdin=subprocess.PIPE, stdout=log, stderr=log,
            )  # fmt: skip
        self.stand_in = self._directory / "python"
        source = Path(stand_in.__file__).read_text().replace('SOCKET = ""', f"SOCKET = {str(self._path)!r}")
        self.stand_in.write_text(f"#!{sys.executable} -IS\n{source}")
        self.stand_in.chmod(0o700)
        atexit.register(self.end)

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Returns the process number of a new job, a child of this process."""
        # The server reads one request at a time: a connection that waits for its turn would hold up the one before it.
        with _adopting(), self._connection() as connection:
            stand_in.send(connection, descriptors, **request)
            with connection.makefile() as lines:
                answer = json.loads(lines.readline() or "{}")
        assert "pid" in answer, answer.get("error", "") or self._log.read_text()
        return int(answer["pid"])

    def wait(self) -> None:
        """Wait until it takes requests."""
        self._connection().close()

    def end(self) -> None:
        """End the server. Jobs that were adopted are left alone."""
        with contextlib.suppress(OSError):
            self._process.communicate()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _connection(self) -> socket.socket:
        until = time.monotonic() + _START_S
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(str(self._path))
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                assert self._process.poll() is None and time.monotonic() < until, self._log.read_text()  # noqa: PT018
                time.sleep(0.01)
            else:
                return connection


_servers: dict[tuple[object, ...], _Server] = {}
_lock = threading.Lock()


def _server(imports: str, environ: Mapping[str, str]) -> _Server:
    """The fork server of such jobs; variables that torch reads at its import have one each."""
    name = (os.getpid(), imports, *sorted(fork_server.import_variables({**environ}).items()))
    with _lock:
        if name not in _servers:
            _servers[name] = _Server(imports, environ)
        return _servers[name]


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Inside, descendants whose parent ends become children of this process."""
    with _lock:
        _libc.prctl(_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            _libc.prctl(_SUBREAPER, 0, 0, 0, 0)
