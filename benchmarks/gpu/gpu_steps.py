"""The sections about training steps on a GPU with and without captures, and about others' copies meanwhile.

See `store_runner.child`.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import capd_client
from benchmarks.gpu.gpu_machine import Accelerator, amounts
from benchmarks.gpu.gpu_sections import capture
from benchmarks.kit.common import daemon, percentile

__all__ = ["host_bound", "interference", "step"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Row = dict[str, Any]

# The share of the free disk that all rounds of a section may write. Nothing is compressed, because that would be
# measured.
DISK_SHARE = 0.4
OPTIONS = ("--codec", "none", "--max-disk", "200GB", "--keep-free", "1GB")


class Training:
    """A model and its steps. `item`: each step ends with `loss.item()`, as in a loop that logs its loss."""

    def __init__(self, machine: Accelerator, model: nn.Module, x: torch.Tensor, item: bool = False) -> None:
        self.machine = machine
        self.model = model
        self._x = x
        self._item = item
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def seconds(self, count: int) -> float:
        """Return the seconds per step of `count` steps."""
        self.machine.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            loss = self.model(self._x).float().square().mean()
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            if self._item:
                loss.item()
        self.machine.synchronize()
        return (time.perf_counter() - started) / count

    def compare(self, select: list[str] | None, steps: int, rounds: int) -> dict[str, float]:
        """Return medians of seconds per step, without capture ("none") and with the selected Y and dY ("capd")."""
        times: dict[str, list[float]] = {"none": [], "capd": []}
        for number in range(rounds + 1):
            for kind in ("none", "capd") if number % 2 else ("capd", "none"):
                handle = None
                if kind == "capd":
                    handle = capd_client.watch(
                        self.model, steps="all", tensors=("output", "grad_output"), select=select
                    )
                seconds = self.seconds(steps)
                if handle is not None:
                    handle.remove()
                    self.machine.drain()
                # The first round warms up.
                if number:
                    times[kind].append(seconds)
        return {kind: statistics.median(found) for kind, found in times.items()}


def _affordable(place: str, nbytes_per_step: int, arena_nbytes: int, rounds: int, most: int) -> int:
    """Return the steps in a row whose captures fit into the arena, and over all rounds onto the disk. At least 1."""
    disk = int(shutil.disk_usage(place).free * DISK_SHARE) // (rounds + 1)
    return max(1, min(most, arena_nbytes * 4 // 5 // nbytes_per_step, disk // nbytes_per_step))


def step(
    place: str, quick: bool, link_gbps: float, rounds: int, policy: str, item: bool, settings: dict[str, str]
) -> Row:
    """Measure a training step that captures Y and dY of as many Linears as half of the link's bytes allow.

    The host issues all calls long before the device runs them, and requests room in the ring at that time. `item`:
    see `Training`. `settings`: further variables of the environment.
    """
    os.environ.update(settings)
    width, rows, layers = (64, 32, 4) if quick else (4096, 8192, 24)
    arena_nbytes = 64 * MIB if quick else 8 * GIB
    with daemon(Path(place), arena_nbytes=arena_nbytes, policy=policy, options=OPTIONS):
        machine = Accelerator()
        dtype = torch.bfloat16 if machine.is_cuda else torch.float32
        linears = [nn.Linear(width, width, bias=False) for _ in range(layers)]
        model = nn.Sequential(*(m for linear in linears for m in (linear, nn.GELU())))
        x = torch.randn(rows, width, device=machine.device, dtype=dtype)
        training = Training(machine, model.to(machine.device, dtype), x, item)
        training.seconds(3)
        alone_s = training.seconds(5)

        per_linear = 2 * rows * width * dtype.itemsize
        chosen = max(1, min(layers, int(link_gbps * 1e9 * alone_s / 2 // per_linear)))
        names = [str(2 * (number * layers // chosen)) for number in range(chosen)]
        nbytes = chosen * per_linear
        steps = _affordable(place, nbytes, arena_nbytes, rounds, 8)
        found = training.compare(names, steps, rounds)
        counters = capd_client.counters()
        capd_client.close()
    return {
        "none ms": found["none"] * 1e3, "capd ms": found["capd"] * 1e3, "ratio": found["capd"] / found["none"],
        "nbytes": nbytes, "steps": steps, "of link": nbytes / found["none"] / (link_gbps * 1e9),
        "dropped": sum(counters["dropped"].values()), "captured": counters["committed"],
        "expected": 2 * chosen * steps * (rounds + 1), **machine.facts(),
    }  # fmt: skip


def host_bound(place: str, quick: bool, link_gbps: float, rounds: int, size: int) -> Row:
    """Measure a step of 500 small Linears whose launches take longer than its kernels.

    It captures 1,000 tensors of `size` bytes.
    """
    width, layers = (64, 5) if quick else (512, 500)
    arena_nbytes = 64 * MIB if quick else 8 * GIB
    with daemon(Path(place), arena_nbytes=arena_nbytes, policy="block", options=OPTIONS):
        machine = Accelerator()
        dtype = torch.bfloat16 if machine.is_cuda else torch.float32
        rows = max(1, size // (width * dtype.itemsize))
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        x = torch.randn(rows, width, device=machine.device, dtype=dtype)
        training = Training(machine, model.to(machine.device, dtype), x)
        training.seconds(3)
        nbytes = 2 * layers * rows * width * dtype.itemsize
        steps = _affordable(place, nbytes, arena_nbytes, rounds, 5)
        found = training.compare(None, steps, rounds)
        counters = capd_client.counters()
        capd_client.close()
    return {
        "size": size, "captures": 2 * layers, "none ms": found["none"] * 1e3, "capd ms": found["capd"] * 1e3,
        "us a capture": (found["capd"] - found["none"]) / (2 * layers) * 1e6, "steps": steps,
        "of link": nbytes / found["none"] / (link_gbps * 1e9), "dropped": sum(counters["dropped"].values()),
        **machine.facts(),
    }  # fmt: skip


SWEEP = [(piece, ahead) for piece in (8, 16, 32) for ahead in (64, 128, 192)]


def interference(place: str, quick: bool) -> list[Row]:
    """Measure a copy of 4 bytes to the host: alone, and beside captures, by size and number of their copies.

    Under policy block the ring is nearly full all the time, and the link is never idle.
    """
    count = 5 if quick else 30
    size = 64 * KIB if quick else 64 * MIB
    variants: list[tuple[str, int | None, int | None]] = [("nothing", None, None), ("captures", None, None)]
    variants += [("captures, swept", piece * MIB, ahead * MIB) for piece, ahead in SWEEP]
    variants += [("unbounded captures", 1 << 40, 1 << 40)]
    rows = []
    with daemon(
        Path(place),
        arena_nbytes=64 * MIB if quick else 4 * GIB + 256 * MIB,
        policy="block",
        options=OPTIONS,
    ):
        machine = Accelerator()
        tensor, scalar = machine.tensor(size), machine.tensor(4)
        host = machine.host(4)
        for beside, piece, ahead in variants:
            with amounts(piece, ahead) as (pieces, under_way):
                times, started_all = [], time.perf_counter()
                for _ in range(count):
                    if beside != "nothing":
                        capture(tensor)
                    machine.synchronize_stream()
                    started = time.perf_counter()
                    host.copy_(scalar.view(torch.uint8), non_blocking=True)
                    machine.synchronize_stream()
                    times.append((time.perf_counter() - started) * 1e6)
                machine.wait_until_home()
                gbps = count * size / (time.perf_counter() - started_all) / 1e9
                machine.drain()
            rows.append(
                {
                    "beside": beside, "piece": pieces / MIB, "ahead": under_way / MIB,
                    "p50 us": statistics.median(times), "p90 us": percentile(times, 90), "max us": max(times),
                    "GB/s": 0.0 if beside == "nothing" else gbps,
                }
            )  # fmt: skip
        capd_client.close()
    return rows
