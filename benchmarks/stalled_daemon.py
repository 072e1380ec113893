"""The cost of capturing every Linear for a training step when the daemon is too slow and the arena is full.

    python benchmarks/stalled_daemon.py [--rounds 8] [--json FILE]

The model and the captures are those of training_overhead.py (68 tensors, 35.1 MB per step). The arena has 16 MB, so
that the warm-up step of each block fills it. The policy is drop.

"stopped": the daemon gets no CPU at all (SIGSTOP). "slow": it is stopped most of the time and takes some 10 MB/s, as
with a slow disk. The bound is 1.03 of a step with empty hooks.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import capd_client
from benchmarks.kit.common import Daemon, daemon, keep_freed_memory, machine, report, spread
from benchmarks.kit.plain_capture import PlainHooks
from benchmarks.training_overhead import TENSORS, Variant, measure, own_client

ARENA_NBYTES = 16 << 20
BOUND = 1.03

# A separate process lets the daemon run for some milliseconds of every 100.
_THROTTLE = """
import os, signal, sys, time
pid, running_s = int(sys.argv[1]), float(sys.argv[2])
while True:
    os.kill(pid, signal.SIGCONT)
    time.sleep(running_s)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.1 - running_s)
"""


class Stalled:
    """A variant's handle: the model is watched, and the daemon is held back. `remove` undoes both."""

    def __init__(self, model: nn.Module, running: Daemon, running_s: float) -> None:
        self._pid = running.pid
        self._throttle: subprocess.Popen[bytes] | None = None
        if running_s:
            command = [sys.executable, "-c", _THROTTLE, str(running.pid), str(running_s)]
            self._throttle = subprocess.Popen(command)
        else:
            os.kill(self._pid, signal.SIGSTOP)
        self._handle = capd_client.watch(model, steps="all", tensors=TENSORS)

    def remove(self) -> None:
        """Let the daemon run again and catch up."""
        self._handle.remove()
        if self._throttle is not None:
            self._throttle.kill()
            self._throttle.wait()
        os.kill(self._pid, signal.SIGCONT)
        capd_client.flush(60.0)


def make_variants(running: Daemon) -> list[Variant]:
    """Return all variants. They are compared with the second one."""
    return [
        Variant("none", lambda model: None),
        Variant("empty hooks", lambda model: PlainHooks(model, None)),
        Variant("stopped", lambda model: Stalled(model, running, 0.0)),
        Variant("slow", lambda model: Stalled(model, running, 0.001)),
    ]


def summarise(variants: list[Variant]) -> dict[str, dict[str, float]]:
    """Return, per variant, the median wall and CPU time of a step in ms, and the ratios to empty hooks."""
    base_cpu, base_wall = (statistics.median(t) for t in (variants[1].cpu_s, variants[1].wall_s))
    rows = {}
    for variant in variants:
        cpu, wall = statistics.median(variant.cpu_s), statistics.median(variant.wall_s)
        rows[variant.name] = {
            "wall_ms": wall * 1e3, "cpu_ms": cpu * 1e3, "wall_ratio": wall / base_wall, "cpu_ratio": cpu / base_cpu
        }  # fmt: skip
    return rows


def show(result: dict[str, Any], variants: list[Variant]) -> None:
    """Print the table and the verdicts."""
    print(f"{'variant':12s} {'wall x':>7s} {'CPU x':>6s}   wall s per step")
    for variant in variants:
        row = result["variants"][variant.name]
        print(
            f"{variant.name:12s} {row['wall_ratio']:7.3f} {row['cpu_ratio']:6.3f}   {spread(variant.wall_s)}"
        )
    print(f"capd: {result['counters']}")
    for name in ("stopped", "slow"):
        ratio = result["variants"][name]["wall_ratio"]
        print(
            f"{name}, wall / empty hooks: {ratio:.3f}, bound {BOUND}: {'met' if ratio <= BOUND else 'MISSED'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each variant in each round")
    parser.add_argument(
        "--directory", type=Path, help="where the temporary store goes (default: the system's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with daemon(args.directory, arena_nbytes=ARENA_NBYTES) as running:
        variants = make_variants(running)
        measure(own_client(), variants, args.rounds, args.steps)
        counters = capd_client.counters()
        capd_client.close()
    result = {"machine": machine(), "variants": summarise(variants), "counters": counters}
    show(result, variants)
    report(result, args.json)


if __name__ == "__main__":
    main()
