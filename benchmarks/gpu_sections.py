"""What `gpu_capture.py` measures, each in a process of its own: `store_runner.child` calls these functions."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import daemon, percentile
from gpu_machine import Accelerator
from torch import nn

import capd_client
from capd_client import cuda, device, pieces
from capd_client.devstats import fill_row, has_kernel
from capd_client.devstats.formulas import fill_from_values
from capd_client.statistics_row import ROW_VALUES

__all__ = ["calls", "interference", "memory", "rows", "small", "step", "transfer"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Row = dict[str, Any]


def capture(tensor: torch.Tensor, number: int = 0) -> None:
    """The call that is measured."""
    capd_client.capture(
        tensor, tensor_name="benchmark", layer_type="linear", component="linear", layer=number
    )


def calls(place: str, quick: bool) -> Row:
    """Host time of capture() by size, alone and in a row, against a copy into a plain buffer on the device."""
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
        dropped = capd_client.counters()["dropped"]
        capd_client.close()
    return {"rows": rows, "dropped": dropped, **machine.facts()}


def transfer(place: str, quick: bool, size: int) -> Row:
    """GB/s from the device to the arena for captures of `size` bytes, against copies into one pinned buffer."""
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
        machine.wait_until_home()
        capd_s = time.perf_counter() - started
        machine.drain()
        dropped = capd_client.counters()["dropped"]
        capd_client.close()
    return {
        "size": size, "plain GB/s": total / plain_s / 1e9, "capd GB/s": total / capd_s / 1e9, "dropped": dropped,
        **machine.facts(),
    }  # fmt: skip


def _timed_steps(machine: Accelerator, model: nn.Module, x: torch.Tensor, count: int) -> float:
    """Seconds per training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    machine.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    machine.synchronize()
    return (time.perf_counter() - started) / count


def step(place: str, quick: bool, link_gbps: float, rounds: int, policy: str) -> Row:
    """A training step with as many Linears' Y and dY captured as make at most half of the link's bytes.

    The host issues all of it long before the device computes it, and asks the ring for room then.
    """
    width, rows, layers = (64, 32, 4) if quick else (4096, 8192, 24)
    arena_nbytes = 64 * MIB if quick else 8 * GIB
    with daemon(Path(place), arena_nbytes=arena_nbytes, policy=policy):
        machine = Accelerator()
        dtype = torch.bfloat16 if machine.is_cuda else torch.float32
        linears = [nn.Linear(width, width, bias=False) for _ in range(layers)]
        model = nn.Sequential(*(m for linear in linears for m in (linear, nn.GELU()))).to(
            machine.device, dtype
        )
        x = torch.randn(rows, width, device=machine.device, dtype=dtype)
        _timed_steps(machine, model, x, 3)
        alone_s = _timed_steps(machine, model, x, 5)

        per_linear = 2 * rows * width * dtype.itemsize
        chosen = max(1, min(layers, int(link_gbps * 1e9 * alone_s / 2 // per_linear)))
        names = [str(2 * (number * layers // chosen)) for number in range(chosen)]
        nbytes = chosen * per_linear
        steps = max(1, min(8, arena_nbytes * 4 // 5 // nbytes))
        times: dict[str, list[float]] = {"none": [], "capd": []}
        for number in range(rounds + 1):
            for kind in ("none", "capd") if number % 2 else ("capd", "none"):
                handle = None
                if kind == "capd":
                    handle = capd_client.watch(
                        model, steps="all", tensors=("output", "grad_output"), select=names
                    )
                seconds = _timed_steps(machine, model, x, steps)
                if handle is not None:
                    handle.remove()
                    machine.drain()
                if number:
                    times[kind].append(seconds)
        counters = capd_client.counters()
        capd_client.close()
    none, capd = (statistics.median(times[kind]) for kind in ("none", "capd"))
    return {
        "none ms": none * 1e3, "capd ms": capd * 1e3, "ratio": capd / none, "nbytes": nbytes, "steps": steps,
        "of link": nbytes / none / (link_gbps * 1e9), "dropped": sum(counters["dropped"].values()),
        "captured": counters["committed"], "expected": 2 * chosen * steps * (rounds + 1), **machine.facts(),
    }  # fmt: skip


def memory(place: str, quick: bool) -> Row:
    """Device memory before, with the ring, and after 1,000 captures of tensors that are freed at once."""
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
    """Captures of 4 KiB per second, from the first call until all are in the arena, and the copies they took."""
    count = 200 if quick else 20_000
    copies = 0
    fetch = cuda.CudaDevice.fetch

    def counted(self: cuda.CudaDevice, *args: Any) -> None:
        nonlocal copies
        copies += 1
        fetch(self, *args)

    with daemon(Path(place), arena_nbytes=64 * MIB if quick else 256 * MIB, policy="block"):
        machine = Accelerator()
        tensor = machine.tensor(4 * KIB)
        capture(tensor)
        machine.drain()
        cuda.CudaDevice.fetch = counted  # type: ignore[method-assign]
        started = time.perf_counter()
        for _ in range(count):
            capture(tensor)
        called_s = time.perf_counter() - started
        machine.wait_until_home()
        home_s = time.perf_counter() - started
        cuda.CudaDevice.fetch = fetch  # type: ignore[method-assign]
        machine.drain()
        dropped = capd_client.counters()["dropped"]
        capd_client.close()
    return {
        "captures": count, "calls per s": count / called_s, "home per s": count / home_s, "copies": copies,
        "dropped": dropped, **machine.facts(),
    }  # fmt: skip


def rows(place: str, quick: bool) -> list[Row]:
    """Microseconds of one statistics row: what the host waits for the call, and what the device needs for it."""
    count = 3 if quick else 50
    found = []
    with daemon(Path(place), arena_nbytes=64 * MIB, policy="block"):
        machine = Accelerator()
        kernel = "Triton kernel" if has_kernel(machine.device, torch.bfloat16) else "fill_row, without Triton"
        for nbytes in (64 * KIB,) if quick else (64 * KIB, MIB, 64 * MIB):
            tensor = machine.tensor(nbytes)
            row = torch.empty(ROW_VALUES, dtype=torch.float64, device=machine.device)
            for name, fill in ((kernel, fill_row), ("torch's operations", _by_operations)):
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


def _by_operations(tensor: torch.Tensor, row: torch.Tensor) -> None:
    fill_from_values(tensor, row, blind=not tensor.is_cpu)


def interference(place: str, quick: bool) -> list[Row]:
    """How long a copy of 4 bytes to the host takes: alone, beside captures as they are, beside unbounded ones.

    Under policy block the ring is nearly full all the time, and the link never idle.
    """
    count = 5 if quick else 60
    size = 64 * KIB if quick else 64 * MIB
    bounds = pieces.PIECE_NBYTES, device.AHEAD_NBYTES
    rows = []
    with daemon(Path(place), arena_nbytes=64 * MIB if quick else 4 * GIB + 256 * MIB, policy="block"):
        machine = Accelerator()
        tensor, scalar = machine.tensor(size), machine.tensor(4)
        host = machine.host(4)
        for kind in ("nothing", "captures", "unbounded captures"):
            pieces.PIECE_NBYTES, device.AHEAD_NBYTES = (1 << 62,) * 2 if "unbounded" in kind else bounds
            times = []
            for _ in range(count):
                if kind != "nothing":
                    capture(tensor)
                machine.synchronize_stream()
                started = time.perf_counter()
                host.copy_(scalar.view(torch.uint8), non_blocking=True)
                machine.synchronize_stream()
                times.append((time.perf_counter() - started) * 1e6)
            machine.drain()
            p50, p90 = statistics.median(times), percentile(times, 90)
            rows.append({"beside": kind, "p50 us": p50, "p90 us": p90, "max us": max(times)})
        capd_client.close()
    return rows
