"""The cost of `capd top` for the node that it watches: its CPU time, and the bytes that it writes to the terminal.

    python benchmarks/live/top.py [--ranks 64] [--seconds 20] [--rounds 3] [--json FILE]

Every rank is a separate process that captures 4 KiB each 0.5 s in a step of its own, so that every row of the table
changes each second. `capd top` runs on a pseudo terminal of 80 × 24 and of 200 × 80 characters, where all ranks are
visible. Its first seconds, in which it imports Textual and draws the first frame, are not measured.

"cpu" is its user and system time as a share of one core. "KB/s" are the bytes that it writes, which SSH
carries. "daemon" is the CPU time of the daemon with `capd top` and without, as a share of one core.

must: 5 % of a core and 5 KB/s.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import capd_client
from benchmarks.kit.common import cpu_s, daemon, machine, report
from benchmarks.many_ranks import Ranks

ARENA_NBYTES = 16 << 20
PERIOD_S = 0.5
# The import, the first frames, and five seconds until all rates are known.
SETTLE_S = 8.0
SIZES = ((80, 24), (200, 80))
MUST_CPU, MUST_NBYTES_S = 0.05, 5000.0

Row = dict[str, Any]


def step_by_step(pipe: Connection, *, stop: float) -> None:
    """Run a rank that captures one tensor a step until the time `stop` (monotonic)."""
    tensor = torch.randn(1024)
    iteration = 0
    _capture(tensor, iteration)
    pipe.send(None)
    pipe.recv()
    while time.monotonic() < stop:
        iteration += 1
        _capture(tensor, iteration)
        time.sleep(PERIOD_S)
    pipe.send(None)


def _capture(tensor: torch.Tensor, iteration: int) -> None:
    capd_client.capture(tensor, tensor_name="x", layer_type="linear", component="linear", iteration=iteration)


class Screen:
    """`capd top` on a pseudo terminal, whose bytes are counted and thrown away."""

    def __init__(self, columns: int, rows: int) -> None:
        self.nbytes = 0
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        hidden = ("COLUMNS", "LINES", "NO_COLOR")
        environ = {name: value for name, value in os.environ.items() if name not in hidden}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "capd", "top"], stdin=theirs, stdout=theirs, stderr=theirs,
            env={**environ, "TERM": "xterm-256color"},
        )  # fmt: skip
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            select.select([self._ours], [], [], 1.0)
            try:
                self.nbytes += len(os.read(self._ours, 1 << 16))
            except OSError:
                # The other end was closed.
                return

    def leave(self) -> int:
        """Type q, and return the exit code."""
        os.write(self._ours, b"q")
        code = self.process.wait(30)
        self._close()
        return code

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(30)
        self._close()

    def _close(self) -> None:
        self._reader.join(30)
        os.close(self._ours)


def measured(running: Any, columns: int, rows: int, seconds: float) -> Row:
    """Return the figures of one size of the terminal."""
    screen = Screen(columns, rows)
    time.sleep(SETTLE_S)
    before, nbytes, began = cpu_s(screen.process.pid), screen.nbytes, time.monotonic()
    served = cpu_s(running.pid)
    time.sleep(seconds)
    took = time.monotonic() - began
    row = {
        "columns": columns, "rows": rows, "cpu": (cpu_s(screen.process.pid) - before) / took,
        "nbytes_s": (screen.nbytes - nbytes) / took, "daemon_cpu": (cpu_s(running.pid) - served) / took,
    }  # fmt: skip
    code = screen.leave()
    if code:
        raise SystemExit(f"capd top ended with exit code {code}")
    return row


def alone(running: Any, seconds: float) -> float:
    """Return the CPU of the daemon that nobody watches, as a share of one core."""
    before, began = cpu_s(running.pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(running.pid) - before) / (time.monotonic() - began)


def measure(directory: Path | None, ranks: int, seconds: float, rounds: int) -> Row:
    """Run all rounds beside one job."""
    total_s = 30 + rounds * (seconds + len(SIZES) * (SETTLE_S + seconds + 2))
    with daemon(directory, arena_nbytes=ARENA_NBYTES) as running:
        crowd = Ranks(ranks, step_by_step, stop=time.monotonic() + total_s)
        crowd.hear()
        crowd.tell()
        rows: list[Row] = []
        unwatched = []
        for _ in range(rounds):
            unwatched.append(alone(running, seconds))
            rows += [measured(running, columns, lines, seconds) for columns, lines in SIZES]
        crowd.hear()
        crowd.join()
    return {"ranks": ranks, "rows": rows, "daemon_alone_cpu": statistics.median(unwatched)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--directory", type=Path, help="where the temporary store goes (default: the system's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: Row = {"machine": machine(), **measure(args.directory, args.ranks, args.seconds, args.rounds)}
    for columns, lines in SIZES:
        here = [row for row in result["rows"] if row["columns"] == columns]
        cpu = statistics.median(row["cpu"] for row in here)
        nbytes_s = statistics.median(row["nbytes_s"] for row in here)
        served = statistics.median(row["daemon_cpu"] for row in here)
        print(
            f"{args.ranks} ranks on {columns} × {lines}: cpu {cpu:.1%} of a core, bound {MUST_CPU:.0%}; "
            f"{nbytes_s / 1000:.2f} KB/s, bound {MUST_NBYTES_S / 1000:.0f}; "
            f"daemon {served:.1%}, alone {result['daemon_alone_cpu']:.1%}"
        )
    report(result, args.json)


if __name__ == "__main__":
    main()
