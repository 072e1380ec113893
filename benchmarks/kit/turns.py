"""Jobs that take turns: each trains in a process of its own, with a daemon of its own, in blocks when it is told to.

The job is that of training_overhead.py: 68 tensors, 35.1 MB a step, every step captured. After each step, some records
of 64 KiB are captured and flushed one by one: from the call to the acknowledgement. A job that has no turn waits, and
its daemon has nothing left to do.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import capd_client
from benchmarks.kit.common import Daemon, daemon, keep_freed_memory, percentile
from benchmarks.training_overhead import ARENA_NBYTES, VOCABULARY, own_client, wait_until_acknowledged

SEQUENCE = 128
PROBES = 8
PROBE_NBYTES = 64 << 10
PATIENCE_S = 120.0

__all__ = ["PATIENCE_S", "TurnJob", "ack_ratio", "serve_blocks", "take_turns", "wall_ratio"]


# The process of a job


def serve_blocks(
    steps: int,
    directory: Path | None,
    config: Path | None,
    settled: Callable[[Daemon], Any],
    begin: Callable[[str], Any] = lambda word: None,
) -> None:
    """Run a block of steps for each line on stdin, and print its times.

    Args:
        steps: The measured steps of a block. One before them warms up.
        directory: Where the temporary store goes.
        config: The capd.toml of the daemon.
        settled: Waits until the daemon has nothing left to do, and returns figures.
        begin: Is called with the line before the first measured step.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    client = own_client()
    torch.manual_seed(0)
    model = client.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(VOCABULARY, (1, SEQUENCE + 1))
    probe = torch.randn(PROBE_NBYTES // 4)
    options = [] if config is None else ["--config", str(config)]
    with daemon(directory, arena_nbytes=ARENA_NBYTES, options=options) as running:
        print(
            json.dumps({"endpoint": running.endpoint, "store": str(running.store), "pid": running.pid}),
            flush=True,
        )
        capd_client.watch(
            model, steps="all", tensors=client.tensors, select={"components": client.components}
        )
        for line in sys.stdin:
            found: dict[str, Any] = {"wall_s": [], "ack_s": []}
            for step in range(steps + 1):
                if step == 1:
                    begin(line.strip())
                began = time.perf_counter()
                model(tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
                wall_s = time.perf_counter() - began
                acks = [_acknowledged(probe) for _ in range(PROBES)]
                wait_until_acknowledged()
                if step:
                    found["wall_s"].append(wall_s)
                    found["ack_s"] += acks
            # Work that is left over would slow the other job down.
            found["settled"] = settled(running)
            found["counters"] = capd_client.counters()
            print(json.dumps(found), flush=True)
        capd_client.close()


def _acknowledged(probe: torch.Tensor) -> float:
    began = time.perf_counter()
    capd_client.capture(probe, tensor_name="probe")
    if not capd_client.flush(timeout_s=PATIENCE_S):
        raise RuntimeError("a record was not acknowledged")
    return time.perf_counter() - began


# The process that compares jobs


class TurnJob:
    """A job in a process of its own, which runs a block when it is told to.

    Attributes:
        endpoint: The endpoint of its daemon.
        store: The store of its daemon.
        pid: The process of its daemon.
        wall_s: The times of the steps, block by block, by the word that the block was told.
        ack_s: The times to the acknowledgement, likewise.
        last: What the last block said.
    """

    def __init__(self, script: str, words: Sequence[str]) -> None:
        """Start it, and wait for its daemon. The script calls `serve_blocks` if --job is among its words."""
        self.wall_s: dict[str, list[list[float]]] = {}
        self.ack_s: dict[str, list[float]] = {}
        self.last: dict[str, Any] = {}
        self._process = subprocess.Popen(
            [sys.executable, script, "--job", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        place = self._hear()
        self.endpoint, self.store, self.pid = str(place["endpoint"]), Path(place["store"]), int(place["pid"])

    def run_block(self, word: str = "block", *, counts: bool = True) -> None:
        """Run a block, and keep its times if it counts."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        self.last = self._hear()
        if counts:
            self.wall_s.setdefault(word, []).append(self.last["wall_s"])
            self.ack_s.setdefault(word, []).extend(self.last["ack_s"])

    @property
    def dropped(self) -> Mapping[str, int]:
        """The drops by reason, after the last block."""
        return self.last["counters"]["dropped"] if self.last else {}

    def close(self) -> None:
        """End it in order."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(PATIENCE_S)

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a job has ended")
        found: dict[str, Any] = json.loads(line)
        return found


def take_turns(turns: Sequence[Callable[[], Any]], rounds: int) -> None:
    """Run each of `turns` once in each round, their order changing from round to round."""
    for number in range(rounds):
        for turn in turns[:: 1 if number % 2 else -1]:
            turn()


def wall_ratio(beside: Sequence[Sequence[float]], alone: Sequence[Sequence[float]]) -> list[float]:
    """Return the ratio of the times of a step, round by round."""
    return [statistics.median(b) / statistics.median(a) for a, b in zip(alone, beside, strict=True)]


def ack_ratio(beside: Sequence[float], alone: Sequence[float]) -> float:
    """Return the ratio of the 99th percentiles."""
    return percentile(beside, 99) / percentile(alone, 99)
