"""Makes a forked process the job that it was forked for: its place in the system, its streams and its program."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import types
from typing import Any

__all__ = ["Program", "become", "fresh_streams", "hide_frames"]

IGNORABLE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


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


def hide_frames(count: int) -> None:
    """Have a traceback begin where that of a cold job begins."""
    show = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        for _ in range(count):
            trace = trace and trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook
