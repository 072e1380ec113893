"""The common parts of the benchmarks: a real daemon on a temporary store, its memory, and a few numbers.

Every comparison is a ratio within one run, of medians over interleaved repetitions. Absolute times of a shared
machine say little.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 120.0

# A separate process samples the daemon, so that the sampling costs the measured process nothing.
_SAMPLER = """
import sys, time
peak = 0
try:
    while True:
        for line in open(f"/proc/{sys.argv[1]}/status"):
            if line.startswith("RssAnon"):
                peak = max(peak, int(line.split()[1]))
        time.sleep(0.05)
except (OSError, KeyboardInterrupt):
    print(peak)
"""


@dataclass
class Daemon:
    """A running `capd serve`. `peak_anonymous_mib` is known once the context has ended."""

    endpoint: str
    store: Path
    pid: int
    peak_anonymous_mib: float = 0.0
    cpu_s: float = 0.0


@contextlib.contextmanager
def daemon(
    directory: Path | None,
    *,
    arena_nbytes: int,
    policy: str = "drop",
    options: Sequence[str] = (),
    prepare: Callable[[Path], None] = lambda store: None,
) -> Iterator[Daemon]:
    """Start a daemon on a temporary store below `directory` and point this process's capd client at it.

    Call it before the first capture, because the client reads its settings once. The store is deleted at the end.

    Args:
        options: Options of `capd serve`.
        prepare: Is called with the directory of the store before the daemon starts.
    """
    root = Path(tempfile.mkdtemp(prefix="capd-benchmark-", dir=directory))
    socket_path = root / "capd.sock"
    prepare(root / "store")
    log = (root / "daemon.log").open("w")
    command = [sys.executable, "-m", "capd", "serve", "--store", str(root / "store")]
    command += ["--endpoint", f"unix:{socket_path}", *options]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    sampler = subprocess.Popen([sys.executable, "-c", _SAMPLER, str(process.pid)], stdout=subprocess.PIPE)
    running = Daemon(f"unix:{socket_path}", root / "store", process.pid)
    try:
        _wait_for(socket_path, process, root / "daemon.log")
        os.environ.update(
            CAPD_ENDPOINT=running.endpoint, CAPD_POLICY=policy, CAPD_ARENA_BYTES=str(arena_nbytes)
        )
        yield running
        running.cpu_s = cpu_s(process.pid)
        sampler.send_signal(signal.SIGINT)
        running.peak_anonymous_mib = int(sampler.communicate(timeout=STOP_TIMEOUT_S)[0]) / 1024
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
        sampler.kill()
        sampler.communicate()
        log.close()
        shutil.rmtree(root)


def _wait_for(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
            return
        time.sleep(0.05)
    raise SystemExit(f"the daemon did not start:\n{log.read_text()}")


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def keep_freed_memory() -> None:
    """Have malloc keep freed memory.

    Otherwise glibc gives large blocks back to the kernel and faults them in again.

    These faults depend on the pattern of allocations. They may cost a training step more than the measured
    difference.
    """
    # From malloc.h.
    trim_threshold, mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    for parameter in (trim_threshold, mmap_threshold):
        if not libc.mallopt(parameter, 1 << 30):
            raise OSError(f"mallopt({parameter}) was refused")


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` of the values are (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def spread(values: Sequence[float]) -> str:
    """Return the median and range as text."""
    return f"{statistics.median(values):.3f} [{min(values):.3f}-{max(values):.3f}]"


def machine() -> dict[str, Any]:
    """Return the facts that a reader of a result needs."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def report(result: dict[str, Any], path: Path | None) -> None:
    """Write the whole result as JSON if `--json FILE` was given."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")
