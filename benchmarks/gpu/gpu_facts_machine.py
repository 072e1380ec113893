"""The facts about a GPU's machine, and the cost of the statistics kernel there."""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
import time
from typing import Any

import torch

from benchmarks.gpu.gpu_runtime import runtime
from benchmarks.gpu.gpu_tables import Check, markdown, size_text

__all__ = ["machine", "rows"]

KIB, MIB = 1 << 10, 1 << 20
Found = tuple[dict[str, Any], list[Check]]

COMMAND_S = 20.0
# Fields of `nvidia-smi -q`. The first match of each counts.
SMI = ("Driver Version", "CUDA Version", "Product Name", "Bus Id", "MIG Mode", "Persistence Mode")


def _said(*command: str) -> str:
    """Return the output of a command. Empty if there is no such command."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def machine(quick: bool) -> Found:
    """Return versions, the link's generation and width, sockets and their CPUs."""
    smi = _said("nvidia-smi", "-q")
    found: dict[str, Any] = {
        "torch": torch.__version__, "CUDA of torch": torch.version.cuda, "ROCm of torch": torch.version.hip,
        "Python": platform.python_version(), "kernel": platform.release(), "CPUs": len(os.sched_getaffinity(0)),
        "Triton": _version("triton"), "memory, GiB": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30,
        "effectful operators": hasattr(torch.library, "_register_effectful_op"),
    }  # fmt: skip
    for name in SMI:
        if match := re.search(rf"^\s*{re.escape(name)}\s*: (.+)$", smi, re.MULTILINE):
            found[name] = match[1]
    for what, block in (("generation", "PCIe Generation"), ("width", "Link Width")):
        if match := re.search(rf"{block}\n\s*Max\s*: (.+)\n(?:.*\n)?\s*Current\s*: (.+)", smi):
            found[f"PCIe {what}, most and now"] = f"{match[1]}, {match[2]}"
    for line in _said("lscpu").splitlines():
        name, _, value = line.partition(":")
        if name in ("Model name", "Socket(s)") or name.startswith("NUMA node"):
            found[name.strip()] = value.strip()
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.get_device_name(0)
        found["GPUs"] = torch.cuda.device_count()
        found["free of GPU 0, GiB"] = round(torch.cuda.mem_get_info(0)[0] / (1 << 30), 1)
    markdown(["fact", "value"], [[name, value] for name, value in found.items()])
    return found, []


def _version(package: str) -> str:
    try:
        return str(importlib.import_module(package).__version__)
    except ImportError:
        return "none"


def rows(quick: bool) -> Found:
    """Measure host and device time of one row, of normal values and of zeros.

    Values of one exponent are the worst case.
    """
    devstats = importlib.import_module("capd_client.devstats")
    row_values = importlib.import_module("capd_client.protocol.statistics_row").ROW_VALUES
    cuda = runtime()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    prepare = getattr(devstats, "prepare", None)
    if torch.cuda.is_available() and prepare is not None:
        prepare(device, lambda: False)
    kernel = devstats.has_kernel(device, torch.bfloat16)
    found: dict[str, Any] = {"kernel": kernel}
    checks = []
    row = torch.empty(row_values, dtype=torch.float64, device=device)
    for nbytes in (64 * KIB,) if quick else (64 * KIB, MIB, 16 * MIB, 64 * MIB):
        for values in ("normal", "zeros"):
            tensor = torch.zeros(nbytes // 2, device=device)
            if values == "normal":
                tensor.normal_()
            tensor = tensor.to(torch.bfloat16)
            call_us, done_us = _row_us(cuda, devstats.fill_row, tensor, row, 3 if quick else 100)
            name = f"{size_text(nbytes)}, {values}"
            found[name] = {"host us": call_us, "device us": done_us}
            if kernel:
                checks.append(Check(f"row of {name}: host, µs", call_us, 40, 20))
                if nbytes == 64 * MIB:
                    checks.append(Check(f"row of {name}: device, µs", done_us, 300, 80))
    markdown(
        ["row of", "host, µs", "device, µs"],
        [[name, *each.values()] for name, each in found.items() if isinstance(each, dict)],
    )
    return found, checks


def _row_us(cuda: Any, fill: Any, tensor: torch.Tensor, row: torch.Tensor, count: int) -> tuple[float, float]:
    fill(tensor, row)
    cuda.synchronize()
    begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    begin.record(cuda.current_stream())
    started = time.perf_counter()
    for _ in range(count):
        fill(tensor, row)
    called = time.perf_counter() - started
    end.record(cuda.current_stream())
    cuda.synchronize()
    return called / count * 1e6, begin.elapsed_time(end) * 1e3 / count
