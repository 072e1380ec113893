"""The cost of the flight recorder for training steps and acknowledgements, and the memory that it takes.

    python benchmarks/live/recorder.py [--rounds 12] [--iterations 4] [--long-steps 5000] [--json FILE]

Two jobs take turns (benchmarks/kit/turns.py): the daemon of one holds the last iterations, that of the other stores all
of it. In every other block of the recorder's job the script asks for a keep: K iterations are stored beside the steps
that follow, and as many more.

"wall x" is the time of a step, with the recorder against plain capture, round by round: the median of the ratios. "keep
x" is the same of blocks with a keep against those without, both of the recorder's job. "ack p99 x" is the ratio of the
99th percentiles over all rounds. "spool" is the largest sum of the held files that a look each 0.2 s found.

A job of its own then trains a small model for thousands of steps of which nothing is kept. "memory x" is the anonymous
memory of its daemon in the last quarter of the steps, against the second: medians.

must: 1.02 for steps, 1.10 for acknowledgements, 1.01 for memory; the spool within its limits; no loss.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import capd_client
from benchmarks.kit.common import Daemon, daemon, machine, percentile, report, spread
from benchmarks.kit.turns import PATIENCE_S, TurnJob, ack_ratio, serve_blocks, take_turns, wall_ratio
from capd.metrics import RunStats
from capd.server.net.daemon_client import connect
from capd.window.place import SHARED_MEMORY

STEP_MUST, ACK_MUST, MEMORY_MUST = 1.02, 1.10, 1.01
SPOOL_NBYTES, MEMORY_NBYTES = 1 << 30, 512 << 20
ARENA_NBYTES = 16 << 20
LOOK_S = 0.2
QUIET_S = 1.0
LOOKS = 40
LONG_STEP_S = 0.02

Result = dict[str, Any]


# The processes of the jobs


def settled_recorder(running: Daemon) -> Result:
    """Wait until nothing is on its way to the store or out of the spool, and return the figures of the run."""
    until, known, since = time.monotonic() + PATIENCE_S, (-1, -1), time.monotonic()
    while True:
        run = _run(running.endpoint)
        now = time.monotonic()
        if (run.committed, run.in_flight) != known:
            known, since = (run.committed, run.in_flight), now
        held = run.window.held_records if run.window else 0
        # An iteration that nobody asks for goes 2 s after it may.
        if run.in_flight == held and now - since > QUIET_S + 2 * bool(run.window):
            return run.model_dump(include={"offered", "committed", "in_flight", "dropped", "window"})
        if now > until:
            raise RuntimeError(f"the daemon does not settle: {run}")
        time.sleep(LOOK_S)


def _run(endpoint: str) -> RunStats:
    with connect(Path(endpoint.removeprefix("unix:"))) as tool:
        [run] = tool.stats().runs
    return run


def begin_block(word: str) -> None:
    """Ask for a keep, if the block is one of those with a keep."""
    if word == "keep":
        capd_client.keep("benchmark")


def train_long(steps: int, directory: Path | None, config: Path) -> None:
    """Train a small model of which nothing is kept, and print the memory of the daemon over the steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    values = torch.randn(64, 64)
    found = []
    with daemon(
        directory, arena_nbytes=ARENA_NBYTES, policy="block", options=["--config", str(config)]
    ) as running:
        capd_client.watch(model, steps="all")
        for step in range(1, steps + 1):
            model(values).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            # A step without a pause would outrun the rules, and their queue would grow up to its limit.
            time.sleep(LONG_STEP_S)
            if step % max(1, steps // LOOKS) == 0:
                found.append(_anonymous_nbytes(running.pid))
        capd_client.flush(PATIENCE_S)
        run = _run(running.endpoint)
        capd_client.close()
    print(
        json.dumps(
            {"anonymous_nbytes": found, "run": run.model_dump(include={"offered", "committed", "dropped"})}
        )
    )


def _anonymous_nbytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


# The process that compares


class SpoolLooks(threading.Thread):
    """Looks at the files of held records of one store.

    Attributes:
        in_memory: The most bytes in /dev/shm.
        altogether: The most bytes, with those on disk.
    """

    def __init__(self, store: Path, others: set[Path]) -> None:
        """Prepare. others: directories in memory that belong to other stores."""
        super().__init__(daemon=True)
        self.in_memory = self.altogether = 0
        self._store, self._others = store, others
        self._ended = threading.Event()

    def run(self) -> None:
        """Look until the end."""
        while not self._ended.wait(LOOK_S):
            in_memory = sum(_nbytes(place) for place in memory_windows() - self._others)
            on_disk = sum(map(_nbytes, self._store.glob("*.zarr/.capd/node=*/window")))
            self.in_memory = max(self.in_memory, in_memory)
            self.altogether = max(self.altogether, in_memory + on_disk)

    def end(self) -> None:
        """Look no more."""
        self._ended.set()
        self.join()


def memory_windows() -> set[Path]:
    """Return the directories of recorders in /dev/shm."""
    return set(SHARED_MEMORY.glob(f"capd-{os.geteuid()}/window-*"))


def _nbytes(place: Path) -> int:
    found = 0
    for path in place.rglob("*.held"):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_blocks * 512
    return found


@contextlib.contextmanager
def settings(iterations: int) -> Iterator[Path]:
    """A capd.toml with a recorder."""
    with tempfile.NamedTemporaryFile("w", prefix="capd-benchmark-", suffix=".toml") as file:
        file.write(
            f"[window]\niterations = {iterations}\nbytes = {SPOOL_NBYTES}\nmemory = {MEMORY_NBYTES}\n"
            '[[trigger]]\nname = "nan"\nmetric = "nan"\nabove = 0\naction = "keep"\n'
        )
        file.flush()
        yield Path(file.name)


def compare(args: argparse.Namespace, config: Path, words: list[str]) -> Result:
    """Let both jobs take turns, and return what they took."""
    alone = TurnJob(__file__, words)
    with contextlib.closing(alone):
        others = memory_windows()
        beside = TurnJob(__file__, [*words, "--config", str(config)])
        looks = SpoolLooks(beside.store, others)
        with contextlib.closing(beside):
            looks.start()
            for job in (alone, beside):
                job.run_block(counts=False)
            kinds = itertools.cycle([("block", "keep"), ("keep", "block")])
            take_turns(
                [alone.run_block, lambda: [beside.run_block(word) for word in next(kinds)]], args.rounds
            )
            looks.end()
    walls = {
        "alone": alone.wall_s["block"], "recorder": beside.wall_s["block"], "keep": beside.wall_s["keep"]
    }  # fmt: skip
    acks = {"alone": alone.ack_s["block"], "recorder": beside.ack_s["block"], "keep": beside.ack_s["keep"]}
    losses = [count for job in (alone, beside) for why, count in job.dropped.items() if why != "expired"]
    return {
        "wall_ratios": wall_ratio(walls["recorder"], walls["alone"]),
        "keep_ratios": wall_ratio(walls["keep"], walls["recorder"]),
        "ack_ratio": ack_ratio(acks["recorder"], acks["alone"]),
        "keep_ack_ratio": ack_ratio(acks["keep"], acks["recorder"]),
        "lost": sum(losses),
        "spool_nbytes": {"memory": looks.in_memory, "altogether": looks.altogether},
        "runs": {"alone": alone.last["settled"], "recorder": beside.last["settled"]},
        "wall_s": walls,
        "ack_s": acks,
    }


def trained_long(args: argparse.Namespace, config: Path, words: list[str]) -> Result:
    """Return the figures of the long job."""
    command = [sys.executable, __file__, "--long-job", "--config", str(config), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: Result = json.loads(done.stdout)
    looks = found["anonymous_nbytes"]
    quarter = max(1, len(looks) // 4)
    found["memory_ratio"] = statistics.median(looks[-quarter:]) / statistics.median(
        looks[quarter : 2 * quarter]
    )
    return found


def show(result: Result) -> None:
    """Print the table and the verdicts."""
    for name, blocks in result["wall_s"].items():
        p50, p99 = (1e3 * percentile(result["ack_s"][name], at) for at in (50, 99))
        walls = [one for block in blocks for one in block]
        print(
            f"{name:8s} wall s per step {spread(walls)}; acknowledged in {p50:.2f} ms p50, {p99:.2f} ms p99"
        )
    spool, long = result["spool_nbytes"], result["long"]
    kept = result["runs"]["recorder"]["committed"]
    print(f"wall x by rounds {spread(result['wall_ratios'])}, keep x {spread(result['keep_ratios'])}")
    print(
        f"{kept} records kept; daemon {long['anonymous_nbytes'][-1] / 2**20:.0f} MiB after {result['long_steps']} steps"
    )
    for name, value, bound in (
        ("recorder / alone, wall x", statistics.median(result["wall_ratios"]), STEP_MUST),
        ("recorder / alone, ack p99 x", result["ack_ratio"], ACK_MUST),
        ("memory x over thousands of steps", long["memory_ratio"], MEMORY_MUST),
        ("spool in /dev/shm, MiB", spool["memory"] / 2**20, MEMORY_NBYTES / 2**20),
        ("spool altogether, MiB", spool["altogether"] / 2**20, SPOOL_NBYTES / 2**20),
        ("records stored of the long job", long["run"]["committed"], 0),
        ("lost captures", result["lost"], 0),
    ):
        print(f"{name}: {value:.3f}, bound {bound}: {'met' if value <= bound else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each block")
    parser.add_argument("--iterations", type=int, default=4, help="iterations that are held")
    parser.add_argument("--long-steps", type=int, default=5000, help="steps of the long job")
    parser.add_argument(
        "--directory", type=Path, help="where the temporary stores go (default: the system's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--long-job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        serve_blocks(args.steps, args.directory, args.config, settled_recorder, begin_block)
        return
    if args.long_job:
        train_long(args.long_steps, args.directory, args.config)
        return
    words = ["--steps", str(args.steps), "--long-steps", str(args.long_steps)]
    words += ["--directory", str(args.directory)] if args.directory else []
    with settings(args.iterations) as config:
        result = {
            "machine": machine(),
            "rounds": args.rounds,
            "steps_per_block": args.steps,
            "iterations": args.iterations,
            "long_steps": args.long_steps,
            **compare(args, config, words),
            "long": trained_long(args, config, words),
        }
    show(result)
    report(result, args.json)


if __name__ == "__main__":
    main()
