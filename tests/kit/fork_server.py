"""The program of a fork server: a Python that has imported torch once and forks a process for each job.

    python fork_server.py SOCKET MODULE[,MODULE…] PADDING

It imports the modules, listens on SOCKET, and ends when its standard input ends. It imports nothing of capd and of the
tests, computes nothing, and starts no thread: a forked process begins as a Python that has just imported the modules.
tests/kit/forking.py and tests/kit/stand_in.py send the requests. PADDING is room for the command line of a job.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

HARMLESS = (
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHON_EXEC",
    "TORCHELASTIC_",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCHINDUCTOR_",
    "PYTORCH_VERSION",
)
READ_AT_IMPORT = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "LD_", "MALLOC_", "PYTHON", "TORCH", "PYTORCH_", "ATEN_", "CUDA_",
)  # fmt: skip
"""Beginnings of the names of variables that Python, torch and their libraries read once, when they are loaded."""


def import_variables(environ: dict[str, str]) -> dict[str, str]:
    """Returns the variables that a job must share with its fork server."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(READ_AT_IMPORT) and not name.startswith(HARMLESS)
    }


class Request:
    """A job that somebody wants: the words after `python`, its environment and its descriptors."""

    def __init__(self, connection: socket.socket) -> None:
        head, descriptors, _, _ = socket.recv_fds(connection, 8, 32)
        if not head:
            raise EOFError("somebody only asked whether there is a server")
        body = b""
        while len(body) < int.from_bytes(head, "big"):
            body += connection.recv(1 << 20)
        self.descriptors = descriptors
        self.connection = connection
        self.fields: dict[str, Any] = json.loads(body)

    def answer(self, **fields: Any) -> None:
        """Send one line to whoever wants the job."""
        self.connection.sendall(json.dumps(fields).encode() + b"\n")

    def drop_descriptors(self) -> None:
        """Close the job's descriptors in this process."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class Server:
    """Forks a process for each request and tells stand-ins how theirs ended.

    The ranks of a job name it by their common parent (`capd_client.process.ranks.node_job`). So the processes that one
    program starts are forked by a server of their own, a fork of this one, which ends after that program.
    """

    def __init__(self, path: str, starter: int = 0) -> None:
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[int, socket.socket] = {}  # job → its stand-in
        self._servers: dict[int, int] = {}  # server → the process whose children it forks
        self._starter = os.pidfd_open(starter) if starter else None
        self._is_ending = False
        self._shared = import_variables(dict(os.environ))

    def run(self) -> Request | None:
        """Serve until the standard input ends, or the starter and its jobs. Returns None, in a job its request."""
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C of the terminal is for the tests
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for file in (0, woken, self._listener, self._starter):
            if file is not None:
                self._selector.register(file, selectors.EVENT_READ)
        while self._waiting or not self._is_ending:
            for key, _ in self._selector.select():
                if key.fileobj == 0:
                    return None
                if key.fileobj == self._starter:
                    self._selector.unregister(self._starter)
                    self._is_ending = True
                elif key.fileobj == woken:
                    os.read(woken, 4096)
                    self._collect()
                elif key.fileobj is self._listener:
                    request = self._begin(self._listener.accept()[0])
                    if request is not None:
                        return request
                else:  # a stand-in says nothing after its request: it is gone
                    self._kill_job_of(key.fileobj)
        return None

    def _begin(self, connection: socket.socket) -> Request | None:
        try:
            request = Request(connection)
        except EOFError:
            connection.close()
            return None
        if "starter" in request.fields:
            return self._begin_server(request)
        wanted = import_variables(request.fields["environ"])
        if wanted != self._shared:
            names = sorted(name for name, _ in wanted.items() ^ self._shared.items())
            request.answer(
                error=f"the fork server has imported torch with other values of {', '.join(names)}"
            )
            request.drop_descriptors()
            return None
        pid = _fork_for_adoption() if request.fields["adopted"] else os.fork()
        if pid == 0:
            self._close()
            return request
        request.drop_descriptors()
        if not request.fields["adopted"]:
            self._waiting[pid] = connection
            self._selector.register(connection, selectors.EVENT_READ)
        request.answer(pid=pid)
        return None

    def _begin_server(self, request: Request) -> Request | None:
        """Answer with the socket of the server for the children of a process; start it, if it is the first."""
        starter = request.fields["starter"]
        path = f"{self._path}.{starter}"
        if starter not in self._servers.values():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            try:
                server = Server(path, starter)
            except ProcessLookupError:  # the starter is gone: its child is anybody's
                request.answer(socket=self._path)
                return None
            pid = os.fork()
            if pid == 0:
                self._close()
                begun = server.run()
                if begun is None:
                    os._exit(0)
                return begun
            server._close()
            self._servers[pid] = starter
        request.answer(socket=path)
        return None

    def _close(self) -> None:
        """Close what is the server's. A selector refers to itself: it would close its number when it is the job's."""
        self._selector.close()
        self._listener.close()
        if self._starter is not None:
            os.close(self._starter)
        for connection in self._waiting.values():
            connection.close()

    def _collect(self) -> None:
        for pid in list(self._servers):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._servers[pid]
        for pid in list(self._waiting):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                connection = self._waiting.pop(pid)
                self._selector.unregister(connection)
                with connection, contextlib.suppress(OSError):  # it may be gone, too
                    connection.sendall(
                        json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode() + b"\n"
                    )

    def _kill_job_of(self, connection: Any) -> None:
        for pid, waiting in list(self._waiting.items()):
            if waiting is connection:  # else its job has ended, too, and was collected just now
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                del self._waiting[pid]
                self._selector.unregister(connection)
                connection.close()


def _fork_for_adoption() -> int:
    """Fork a process whose parent is gone at once, so that the kernel gives it to whoever asked for it."""
    mine, theirs = os.pipe()
    between = os.fork()
    if between:
        os.close(theirs)
        os.waitpid(between, 0)
        pid = int.from_bytes(os.read(mine, 8), "big")
        os.close(mine)
        return pid
    between = os.getpid()
    pid = os.fork()
    if pid:
        os.write(theirs, pid.to_bytes(8, "big"))
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0002)
    return 0


def main() -> None:
    """Serve; in a forked process, run the job."""
    import forked_job  # beside this file, which is a program of its own

    sys.path.pop(0)
    del sys.modules["forked_job"]  # a job may have a module of this name
    path, modules = sys.argv[1], sys.argv[2].split(",")
    named = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    base = [entry for entry in sys.path if entry not in named]
    for module in modules:
        __import__(module)
    strangers = sorted(
        name for name in sys.modules if name.partition(".")[0] in ("capd", "capd_client", "tests")
    )
    assert not strangers, f"imported before any job: {strangers}"
    server = Server(path)
    gc.collect()
    gc.freeze()  # a job's collections leave these pages alone, so they stay shared
    request = server.run()
    if request is None:
        return
    fields = request.fields
    request.connection.detach()
    forked_job.become(fields, request.descriptors)
    program = forked_job.Program(fields["executable"], fields["arguments"])
    del server, request
    forked_job.fresh_streams(program.unbuffered)
    program.set_paths(base)
    program.customise()
    try:
        program.run()
    except SystemExit:
        raise
    except BaseException:
        forked_job.hide_frames(3)  # this file's, main's and run's
        raise


if __name__ == "__main__":
    main()
