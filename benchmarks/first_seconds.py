"""The cost of the first five seconds of a captured job, and the memory of its arena, compared with the bare job.

    python benchmarks/first_seconds.py [--rounds 3] [--json FILE]

The model is that of training_overhead.py. Each run has its own process, with the arena at its default limit of 2
GiB. Only the first step is captured, which is the default. The other steps show the cost of the work in the
background.

must: arena RSS <= 2 times the highest bytes in flight + 64 MiB. The highest bytes in flight are those of one step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import capd_client
from benchmarks.kit.common import daemon, machine, report
from benchmarks.training_overhead import SEQUENCE, TENSORS, VOCABULARY, Transformer

SECONDS = 5.0
ARENA_NBYTES = 2 << 30
# The captures of a step, which are the most that is in flight here.
STEP_MIB = 35.1e6 / (1 << 20)


def resident_shared_mib() -> float:
    """Return the MiB of shared memory in this process, which are its arena."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssShmem:"))


def train() -> dict[str, float]:
    """Run steps for SECONDS after `watch`. The environment decides whether they are captured."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.randint(VOCABULARY, (1, SEQUENCE + 1))
    # torch initialises itself in the first steps.
    for _ in range(3):
        model(tokens).backward()
        optimizer.zero_grad()
    base_mib = resident_shared_mib()
    times: list[float] = []
    cpu, began = time.process_time(), time.perf_counter()
    if os.environ.get("CAPD_ENDPOINT"):
        capd_client.watch(model, tensors=TENSORS)
    while len(times) < 2 or time.perf_counter() - began < SECONDS:
        started = time.perf_counter()
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    return {
        "steps": len(times),
        "first_step_ms": times[0] * 1e3,
        "step_ms": statistics.fmean(times[1:]) * 1e3,
        "cpu_ms": (time.process_time() - cpu) / len(times) * 1e3,
        "arena_rss_mib": resident_shared_mib() - base_mib,
    }


def measured(captured: bool) -> dict[str, Any]:
    """Run one process."""
    env = dict(os.environ)
    if not captured:
        env.pop("CAPD_ENDPOINT")
    done = subprocess.run(
        [sys.executable, __file__, "--child"], env=env, stdout=subprocess.PIPE, check=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--directory", type=Path, help="where the temporary store goes (default: the system's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(train()))
        return
    rows: dict[str, list[dict[str, Any]]] = {"bare": [], "capd": []}
    with daemon(args.directory, arena_nbytes=ARENA_NBYTES):
        for number in range(args.rounds):
            for name in sorted(rows, reverse=bool(number % 2)):
                rows[name].append(measured(name == "capd"))
    print(
        f"{'':8s}{'step ms':>10s}{'CPU ms':>10s}{'step 1 ms':>12s}{'arena RSS MiB':>16s}   medians of {args.rounds}"
    )
    for name, found in rows.items():
        step, cpu, first, rss = (
            statistics.median(one[key] for one in found)
            for key in ("step_ms", "cpu_ms", "first_step_ms", "arena_rss_mib")
        )
        print(f"{name:8s}{step:10.2f}{cpu:10.2f}{first:12.1f}{rss:16.1f}")
    for key in ("step_ms", "cpu_ms"):
        ratios = [a[key] / b[key] for a, b in zip(rows["capd"], rows["bare"], strict=True)]
        print(f"{key}, capd / bare: {statistics.median(ratios):.3f}")
    bound, most = 2 * STEP_MIB + 64, max(one["arena_rss_mib"] for one in rows["capd"])
    print(f"arena RSS at most {most:.1f} MiB, bound {bound:.1f}: {'met' if most <= bound else 'MISSED'}")
    report({"machine": machine(), "rows": rows}, args.json)


if __name__ == "__main__":
    main()
