"""Faults inside system calls of a daemon: a prefix for its command line that makes strace inject them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.kit.processes import until

__all__ = ["inject", "injected", "needs_strace"]


@cache
def _works() -> bool:
    if shutil.which("strace") is None:
        return False
    command = [*inject("getppid", "error=EIO"), sys.executable, "-c", "import os; os.getppid()"]
    return subprocess.run(command, capture_output=True, timeout=30).returncode == 0


def inject(calls: str, action: str, when: int | str = "") -> tuple[str, ...]:
    """The prefix: `action` (as in strace's inject=) for the system calls named, at the passes `when` names.

    Passes are counted per thread. The daemon stays the child of the test; strace is its grandchild.
    """
    passes = f":when={when}" if when else ""
    options = ("-DD", "-f", "-qq", "-o", "/dev/null")
    return ("strace", *options, "-e", f"trace={calls}", "-e", f"inject={calls}:{action}{passes}")


def needs_strace() -> None:
    """Skip the test where strace is missing or may not trace."""
    if not _works():
        pytest.skip("needs strace, and the permission to trace (apt install strace; ptrace_scope)")


@contextlib.contextmanager
def injected(pid: int, calls: str, action: str) -> Iterator[None]:
    """While the block runs, `action` for every one of these system calls of all threads of `pid`."""
    options = ("-f", "-o", "/dev/null", "-e", f"trace={calls}", "-e", f"inject={calls}:{action}")
    tracer = subprocess.Popen(["strace", *options, "-p", str(pid)], stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    try:
        line = tracer.stderr.readline()
        assert "attached" in line, line
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
        until(lambda: _traced(pid) >= threads)
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.stderr.close()
        tracer.wait(30)


def _traced(pid: int) -> int:
    """Threads of a process that have a tracer."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += "TracerPid:\t0\n" not in (task / "status").read_text()
    return found
