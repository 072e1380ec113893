"""The sections of `gpu_capture.py` about single captures, each in a separate process: see `store_runner.child`."""

from __future__ import annotations

import cProfile
import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import capd_client
from benchmarks.gpu.gpu_machine import Accelerator
from benchmarks.kit.common import daemon, percentile
from capd_client.device.cuda.device import CudaDevice
from capd_client.devstats import fill_row, fill_rows, has_kernel, prepare
from capd_client.devstats.formulas import fill_from_values
from capd_client.protocol.statistics_row import ROW_VALUES

__all__ = ["calls", "capture", "memory", "rows", "small", "transfer"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Row = dict[str, Any]


def capture(tensor: torch.Tensor, number: int = 0) -> None:
    """Make the measured call."""
    capd_client.capture(
        tensor, tensor_name="benchmark", layer_type="linear", component="linear", layer=number
    )


def calls(place: str, quick: bool, mode: str) -> Row:
    """Measure the host time of capture() by size, alone and in a row, compared with a copy on the device."""
    os.environ["CAPD_MODE"] = mode
    sizes = [4 * KIB, 64 * KIB] if quick else [4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
    rounds = 3 if quick else 40
    rows = []
    with daemon(Path(place), arena_nbytes=64 * MIB if quick else GIB, policy="block"):
        machine = Accelerator()
        for nbytes in sizes:
            tensor = machine.tensor(nbytes)
            buffer = torch.empty_like(tensor)
            times: dict[str, list[float]] = {"plain": [], "alone": [], "in a row": []}
            in_a_row = max(1, min(32, 128 * MIB // nbytes))
            capture(tensor)
            machine.drain()
            for _ in range(rounds):
                for kind, count in (("plain", in_a_row), ("alone", 1), ("in a row", in_a_row)):
                    machine.synchronize()
                    with machine.no_synchronisation():
                        for _ in range(count):
                            started = time.perf_counter()
                            if kind == "plain":
                                buffer.copy_(tensor)
                            else:
                                capture(tensor)
                            times[kind].append(time.perf_counter() - started)
                    machine.drain()
            p50 = {f"{kind} us": statistics.median(found) * 1e6 for kind, found in times.items()}
            p99 = percentile(times["in a row"], 99) * 1e6
            rows.append({"size": nbytes, **p50, "in a row p99 us": p99})
        parts = _parts(machine, machine.tensor(4 * KIB if quick else 64 * KIB), 100 if quick else 1000)
        dropped = capd_client.counters()["dropped"]
        capd_client.close()
    return {"rows": rows, "parts": parts, "dropped": dropped, **machine.facts()}


# The parts by their file and function in a profile. The first match counts.
PARTS = (
    ("copy", r"method 'copy_'|ring\.py \(write\)"),
    ("capture check", r"[cC]apturing"),
    ("issue", r"fetch|hold_back|wait_event|pieces|transfers|pump"),
    ("event", r"Event|\(record\)|'record'|_event\)"),
    ("stream", r"[sS]tream"),
    ("statistics", r"devstats|triton"),
    ("room", r"allocator|inflight|accounts|policies|ring\.py|waiting|admission|counting"),
    ("names", r"api|key|context|config|definitions|staging|border|describing|session"),
)


def _parts(machine: Accelerator, tensor: torch.Tensor, count: int) -> dict[str, float]:
    """Return the host µs of a call by part, each function's own time under cProfile."""
    profile = cProfile.Profile()
    for _ in range(0, count, 50):
        with machine.no_synchronisation():
            profile.enable()
            for _ in range(50):
                capture(tensor)
            profile.disable()
        machine.drain()
    parts: dict[str, float] = {}
    for entry in profile.getstats():
        code = entry.code
        text = code if isinstance(code, str) else f"{Path(code.co_filename).name} ({code.co_name})"
        part = next((part for part, pattern in PARTS if re.search(pattern, text)), "rest")
        parts[part] = parts.get(part, 0.0) + entry.inlinetime / count * 1e6
    return parts


def compute() -> None:
    """Run a fifth of a millisecond of a training thread's Python, mostly with the interpreter's lock."""
    numbers = torch.zeros(16)
    for _ in range(20):
        numbers.add_(1)
        sum(range(400))


def transfer(place: str, quick: bool, size: int, beside: str) -> Row:
    """Measure GB/s from the device to the arena for captures of `size` bytes, against copies into one pinned buffer.

    `beside` is the training thread's work meanwhile: it waits ("idle"), or computes in Python ("busy").
    """
    total = 8 * MIB if quick else 4 * GIB
    with daemon(Path(place), arena_nbytes=total + total // 8, policy="block"):
        machine = Accelerator()
        tensors = [machine.tensor(size) for _ in range(2)]
        host = machine.host(size)
        for tensor in tensors:
            capture(tensor)
        machine.drain()

        machine.synchronize()
        started = time.perf_counter()
        for number in range(total // size):
            host.copy_(tensors[number % 2].view(torch.uint8), non_blocking=True)
        machine.synchronize()
        plain_s = time.perf_counter() - started

        started = time.perf_counter()
        for number in range(total // size):
            capture(tensors[number % 2])
            if beside == "busy":
                compute()
        machine.wait_until_home(compute if beside == "busy" else None)
        capd_s = time.perf_counter() - started
        machine.drain()
        dropped = capd_client.counters()["dropped"]
        capd_client.close()
    return {
        "size": size, "plain GB/s": total / plain_s / 1e9, "capd GB/s": total / capd_s / 1e9, "dropped": dropped,
        **machine.facts(),
    }  # fmt: skip


def memory(place: str, quick: bool) -> Row:
    """Measure device memory before, with the ring, and after 1,000 captures of tensors that are freed at once."""
    count = 50 if quick else 1000
    with daemon(Path(place), arena_nbytes=64 * MIB if quick else GIB, policy="block"):
        machine = Accelerator()
        ready = machine.allocated()
        for number in range(count):
            tensor = machine.tensor((4 * KIB, 64 * KIB, 3 * MIB)[number % 3])
            capture(tensor)
            tensor.untyped_storage().resize_(0)
        del tensor
        machine.drain()
        after = machine.allocated()
        dropped = capd_client.counters()["dropped"]
        capd_client.close()
    return {
        "captures": count, "ring MiB": (ready - machine.allocated_before) / MIB, "growth": after - ready,
        "dropped": dropped, **machine.facts(),
    }  # fmt: skip


def small(place: str, quick: bool) -> Row:
    """Measure captures of 4 KiB per second, from the first call until all are in the arena, and their copies."""
    count = 200 if quick else 20_000
    copies = 0
    fetch = CudaDevice.fetch

    def counted(self: CudaDevice, *args: Any, **more: Any) -> None:
        nonlocal copies
        copies += 1
        fetch(self, *args, **more)

    with daemon(Path(place), arena_nbytes=64 * MIB if quick else 256 * MIB, policy="block"):
        machine = Accelerator()
        tensor = machine.tensor(4 * KIB)
        capture(tensor)
        machine.drain()
        CudaDevice.fetch = counted  # type: ignore[method-assign]
        started = time.perf_counter()
        for _ in range(count):
            capture(tensor)
        called_s = time.perf_counter() - started
        machine.wait_until_home()
        home_s = time.perf_counter() - started
        CudaDevice.fetch = fetch  # type: ignore[method-assign]
        machine.drain()
        dropped = capd_client.counters()["dropped"]
        capd_client.close()
    return {
        "captures": count, "calls per s": count / called_s, "home per s": count / home_s, "copies": copies,
        "dropped": dropped, **machine.facts(),
    }  # fmt: skip


def rows(place: str, quick: bool) -> list[Row]:
    """Measure the µs of one statistics row: the host's wait for the call, and the device's time for it."""
    count = 3 if quick else 50
    found = []
    with daemon(Path(place), arena_nbytes=64 * MIB, policy="block"):
        machine = Accelerator()
        if machine.is_cuda:
            prepare(machine.device, dtypes=[torch.bfloat16])
        kernel = "Triton kernel" if has_kernel(machine.device, torch.bfloat16) else "fill_row, without Triton"
        for nbytes in (64 * KIB,) if quick else (64 * KIB, MIB, 64 * MIB):
            tensor = machine.tensor(nbytes)
            row = torch.empty(ROW_VALUES, dtype=torch.float64, device=machine.device)
            for name, fill in (
                (kernel, fill_row),
                (SIXTEEN, _sixteen),
                ("torch's operations", _by_operations),
            ):
                fill(tensor, row)
                machine.synchronize()
                started = time.perf_counter()
                for _ in range(count):
                    fill(tensor, row)
                called_s = time.perf_counter() - started
                machine.synchronize()
                done_s = time.perf_counter() - started
                found.append(
                    {
                        "size": nbytes,
                        "way": name,
                        "call us": called_s / count * 1e6,
                        "done us": done_s / count * 1e6,
                    }
                )
        capd_client.close()
    return found


SIXTEEN = "16 such tensors at once"


def _sixteen(tensor: torch.Tensor, row: torch.Tensor) -> None:
    fill_rows([(tensor, row)] * 16)


def _by_operations(tensor: torch.Tensor, row: torch.Tensor) -> None:
    fill_from_values(tensor, row, blind=not tensor.is_cpu)
