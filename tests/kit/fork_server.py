"""The program of a fork server: a Python that has imported torch once and forks a process for each job.

    python fork_server.py SOCKET MODULE[,MODULE…] PADDING

It imports the modules, listens on SOCKET, and ends when its standard input ends. It imports nothing of capd and of the
tests, computes nothing, and starts no thread: a forked process begins as a Python that has just imported the modules.
tests/kit/forking.py and tests/kit/stand_in.py send the requests. PADDING is room for the command line of a job.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import selectors
import signal
import socket
import sys
import time
import types
from typing import Any

IGNORABLE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
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
    """Forks a process for each request and tells stand-ins how theirs ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[int, socket.socket] = {}  # job → its stand-in
        self._shared = import_variables(dict(os.environ))

    def run(self) -> Request | None:
        """Serve until the standard input ends. Returns None then, and in a forked process its request."""
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C of the terminal is for the tests
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for file in (0, woken, self._listener):
            self._selector.register(file, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == 0:
                    return None
                if key.fileobj == woken:
                    os.read(woken, 4096)
                    self._collect()
                elif key.fileobj is self._listener:
                    request = self._begin(self._listener.accept()[0])
                    if request is not None:
                        return request
                else:  # a stand-in says nothing after its request: it is gone
                    self._kill_job_of(key.fileobj)

    def _begin(self, connection: socket.socket) -> Request | None:
        try:
            request = Request(connection)
        except EOFError:
            connection.close()
            return None
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
            return request
        request.drop_descriptors()
        if not request.fields["adopted"]:
            self._waiting[pid] = connection
            self._selector.register(connection, selectors.EVENT_READ)
        request.answer(pid=pid)
        return None

    def _collect(self) -> None:
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


def become(fields: dict[str, Any], descriptors: list[int]) -> None:
    """Take the job's place in the system: its group, descriptors, directory, environment and signals."""
    os.umask(fields["umask"])
    if fields["new_session"]:
        os.setsid()
    if fields["group"] is not None:
        os.setpgid(0, fields["group"])
    _place(descriptors, [0, 1, 2, *fields["pass_fds"]])
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in IGNORABLE:
        if number in fields["ignored"]:
            signal.signal(number, signal.SIG_IGN)
    os.chdir(fields["directory"])
    os.environ.clear()
    os.environ.update(fields["environ"])
    _write_command_line([fields["executable"], *fields["arguments"]])


def _place(descriptors: list[int], targets: list[int]) -> None:
    """Move the descriptors to their numbers and close every other one."""
    import fcntl

    above = max([*descriptors, *targets]) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for source, target in zip(moved, targets, strict=True):
        os.dup2(source, target)
    kept = sorted(targets)
    for first, last in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(first + 1, last)


def _write_command_line(words: list[str]) -> None:
    """Let /proc show the job's words. They take the place of this server's own words, its padding included."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: room - 1]
    ctypes.memmove(start, text.ljust(room, b"\0"), room)


def fresh_streams(unbuffered: bool) -> None:
    """Make sys.stdin, sys.stdout and sys.stderr, as Python does at its start."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        old = getattr(sys, name)
        raw = unbuffered and mode == "w"
        binary: Any = io.open(descriptor, mode + "b", 0 if raw else -1, closefd=False)  # noqa: UP020, SIM115
        (binary if raw else binary.raw).name = f"<{name}>"
        lines = not unbuffered and (binary.isatty() or name == "stderr")
        stream = io.TextIOWrapper(
            binary, old.encoding, old.errors, newline="\n", line_buffering=lines, write_through=unbuffered
        )
        stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class Program:
    """What `python ARGUMENTS` would run: a file, `-m MODULE` or `-c CODE`, with `-u` or not."""

    def __init__(self, executable: str, arguments: list[str]) -> None:
        words = list(arguments)
        self.unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
        while words and words[0] == "-u":
            self.unbuffered = True
            words.pop(0)
        self.kind = words[0] if words[0] in ("-c", "-m") else "file"
        self.target, self.rest = (words[0], words[1:]) if self.kind == "file" else (words[1], words[2:])
        sys.orig_argv = [executable, *arguments]

    def set_paths(self, base: list[str]) -> None:
        """Set sys.path and sys.argv. base: the part of sys.path that follows PYTHONPATH."""
        named = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        first = {"-c": "", "-m": os.getcwd()}.get(self.kind, os.path.dirname(os.path.realpath(self.target)))
        sys.path[:] = [*dict.fromkeys([*named, *base])]
        self._first = first
        sys.argv = [self.kind if self.kind != "file" else self.target, *self.rest]

    def customise(self) -> None:
        """Import sitecustomize, if the job's path has another one, as Python's start does."""
        import importlib
        import site

        importlib.invalidate_caches()
        sys.modules.pop("sitecustomize", None)
        site.execsitecustomize()
        sys.path.insert(0, self._first)

    def run(self) -> None:
        """Run it as `__main__`; whatever it raises is raised."""
        import runpy

        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = sys.modules["builtins"]
        sys.modules["__main__"] = main
        if self.kind == "-m":
            runpy._run_module_as_main(self.target)  # type: ignore[attr-defined]
            return
        if self.kind == "-c":
            code = compile(self.target, "<string>", "exec", dont_inherit=True)
        else:
            from importlib.machinery import SourceFileLoader

            main.__file__ = self.target
            main.__loader__ = SourceFileLoader("__main__", self.target)
            with open(self.target, "rb") as file:
                code = compile(file.read(), self.target, "exec", dont_inherit=True)
        exec(code, main.__dict__)  # noqa: S102


def _hide_frames(count: int) -> None:
    """Have a traceback begin where that of a cold job begins."""
    show = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        for _ in range(count):
            trace = trace and trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook


def main() -> None:
    """Serve; in a forked process, run the job."""
    path, modules = sys.argv[1], sys.argv[2].split(",")
    named = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    base = [entry for entry in sys.path[1:] if entry not in named]
    for module in modules:
        __import__(module)
    strangers = sorted(
        name for name in sys.modules if name.partition(".")[0] in ("capd", "capd_client", "tests")
    )
    assert not strangers, f"imported before any job: {strangers}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(64)
    gc.collect()
    gc.freeze()  # a job's collections leave these pages alone, so they stay shared
    request = Server(listener).run()
    if request is None:
        return
    fields = request.fields
    for connection in (listener, request.connection):
        connection.detach()
    become(fields, request.descriptors)
    program = Program(fields["executable"], fields["arguments"])
    del listener, request, connection
    fresh_streams(program.unbuffered)
    program.set_paths(base)
    program.customise()
    try:
        program.run()
    except SystemExit:
        raise
    except BaseException:
        _hide_frames(3)  # this file's, main's and run's
        raise


if __name__ == "__main__":
    main()
