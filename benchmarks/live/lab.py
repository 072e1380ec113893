"""The cost of the lab for a training step and for acknowledgements, while every step is captured.

    python benchmarks/live/lab.py [--rounds 24] [--formats LIST] [--sample 1/8] [--cpu 20%] [--json FILE]

The job is that of training_overhead.py: 68 tensors, 35.1 MB a step. Two jobs, each with a daemon of its own, take turns
in blocks: one daemon has a lab, the other has none. The job that has no turn waits, and its lab has nothing left to do.
After each step, some records of 64 KiB are captured and flushed one by one: from the call to the acknowledgement.

"wall x" is the time of a step, with the lab against without, round by round: the median of the ratios. "ack p99 x" is
the ratio of the 99th percentiles over all rounds.

must: 1.02 for steps, 1.10 for acknowledgements, and no drop.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from capd.cli.daemon_client import connect

import capd_client
from benchmarks.kit.common import daemon, keep_freed_memory, machine, percentile, report, spread
from benchmarks.training_overhead import ARENA_NBYTES, VOCABULARY, own_client, wait_until_acknowledged

STEP_MUST, ACK_MUST = 1.02, 1.10
SEQUENCE = 128
PROBES = 8
PROBE_NBYTES = 64 << 10
PATIENCE_S = 120.0


# The process of a job


def serve_blocks(steps: int, directory: Path | None) -> None:
    """Run a block of steps for each line on stdin, and print its times. The environment says whether there is a lab."""
    torch.set_num_threads(1)
    keep_freed_memory()
    client = own_client()
    torch.manual_seed(0)
    model = client.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(VOCABULARY, (1, SEQUENCE + 1))
    probe = torch.randn(PROBE_NBYTES // 4)
    with daemon(directory, arena_nbytes=ARENA_NBYTES) as running:
        for name in [name for name in os.environ if name.startswith("CAPD_LAB_")]:
            del os.environ[name]
        capd_client.watch(
            model, steps="all", tensors=client.tensors, select={"components": client.components}
        )
        for number, _ in enumerate(sys.stdin):
            found: dict[str, Any] = {"wall_s": [], "ack_s": []}
            for step in range(steps + 1):
                began = time.perf_counter()
                model(tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
                wall_s = time.perf_counter() - began
                acks = [_acknowledged(probe, 1000 * number + step) for _ in range(PROBES)]
                wait_until_acknowledged()
                if step:
                    found["wall_s"].append(wall_s)
                    found["ack_s"] += acks
            # Work that is left over would slow the other job down.
            found["lab"] = _settled_lab(running.endpoint)
            found["counters"] = capd_client.counters()
            print(json.dumps(found), flush=True)
        capd_client.close()


def _acknowledged(probe: torch.Tensor, iteration: int) -> float:
    began = time.perf_counter()
    capd_client.capture(probe, tensor_name="probe", iteration=iteration)
    if not capd_client.flush(timeout_s=PATIENCE_S):
        raise RuntimeError("a record was not acknowledged")
    return time.perf_counter() - began


def _settled_lab(endpoint: str) -> dict[str, Any] | None:
    """Wait until nothing waits to be measured, and return the figures of the lab."""
    until = time.monotonic() + PATIENCE_S
    while True:
        with connect(Path(endpoint.removeprefix("unix:"))) as tool:
            lab = tool.stats().lab
        if lab is None or not lab.waiting:
            return None if lab is None else lab.model_dump()
        if time.monotonic() > until:
            raise RuntimeError(f"{lab.waiting} records still wait to be measured")
        time.sleep(0.2)


# Both jobs


class LabJob:
    """A job in a process of its own, which runs a block when it is told to."""

    def __init__(self, steps: int, directory: Path | None, lab: dict[str, str]) -> None:
        self.wall_s: list[list[float]] = []
        self.ack_s: list[float] = []
        self.last: dict[str, Any] = {}
        words = ["--job", "--steps", str(steps), *(["--directory", str(directory)] if directory else [])]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **lab},
        )  # fmt: skip

    def run_block(self, *, counts: bool = True) -> None:
        """Run a block, and keep its times if it counts."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("block\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a job has ended")
        self.last = json.loads(line)
        if counts:
            self.wall_s.append(self.last["wall_s"])
            self.ack_s += self.last["ack_s"]

    def close(self) -> None:
        """End it in order."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(PATIENCE_S)


@contextlib.contextmanager
def jobs(args: argparse.Namespace) -> Iterator[tuple[LabJob, LabJob]]:
    """The job without a lab, and the one with it."""
    lab = {"CAPD_LAB_FORMATS": args.formats, "CAPD_LAB_SAMPLE": args.sample, "CAPD_LAB_CPU": args.cpu}
    pair = LabJob(args.steps, args.directory, {}), LabJob(args.steps, args.directory, lab)
    try:
        yield pair
    finally:
        for job in pair:
            job.close()


def show(result: dict[str, Any], alone: LabJob, beside: LabJob) -> None:
    """Print the table and the verdicts."""
    for name, job in (("alone", alone), ("lab", beside)):
        p50, p99 = (1e3 * percentile(job.ack_s, at) for at in (50, 99))
        walls = [one for block in job.wall_s for one in block]
        print(
            f"{name:6s} wall s per step {spread(walls)}; acknowledged in {p50:.2f} ms p50, {p99:.2f} ms p99"
        )
    records = {outcome: count for outcome, count in result["lab"]["records"].items() if count}
    print(f"lab: {records}, {result['lab']['cpu_s']:.1f} s CPU")
    for name, value, bound in (
        ("lab / alone, wall x", result["wall_ratio"], STEP_MUST),
        ("lab / alone, ack p99 x", result["ack_ratio"], ACK_MUST),
        ("dropped captures", result["dropped"], 0),
    ):
        print(f"{name}: {value:.3f}, bound {bound}: {'met' if value <= bound else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each job in each round")
    parser.add_argument("--formats", default="fp8,mxfp8,nvfp4,hifp8")
    parser.add_argument("--sample", default="1/8")
    parser.add_argument("--cpu", default="20%")
    parser.add_argument(
        "--directory", type=Path, help="where the temporary stores go (default: the system's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        serve_blocks(args.steps, args.directory)
        return
    with jobs(args) as (alone, beside):
        for job in (alone, beside):
            job.run_block(counts=False)
        for number in range(args.rounds):
            for job in (alone, beside)[:: 1 if number % 2 else -1]:
                job.run_block()
    ratios = [
        statistics.median(b) / statistics.median(a) for a, b in zip(alone.wall_s, beside.wall_s, strict=True)
    ]
    result = {
        "machine": machine(),
        "rounds": args.rounds,
        "steps_per_round": args.steps,
        "formats": args.formats,
        "wall_ratio": statistics.median(ratios),
        "ack_ratio": percentile(beside.ack_s, 99) / percentile(alone.ack_s, 99),
        "dropped": sum(sum(job.last["counters"]["dropped"].values()) for job in (alone, beside)),
        "lab": beside.last["lab"],
        "wall_s": {"alone": alone.wall_s, "lab": beside.wall_s},
        "ack_s": {"alone": alone.ack_s, "lab": beside.ack_s},
    }
    show(result, alone, beside)
    report(result, args.json)


if __name__ == "__main__":
    main()
