"""The costs of copies between device and host for each other and for kernels, and of a kernel's first launch."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.gpu.gpu_runtime import runtime
from benchmarks.gpu.gpu_tables import Check, markdown

__all__ = ["link", "loading"]

MIB = 1 << 20
# Half a second and more.
SLEEP_CYCLES = 1_000_000_000
Found = tuple[dict[str, Any], list[Check]]


class Copies:
    """A device buffer, a page-locked one, and a side stream between them."""

    def __init__(self, quick: bool) -> None:
        self.cuda = runtime()
        self.is_cuda = torch.cuda.is_available()
        self.device = "cuda" if self.is_cuda else "cpu"
        self.unit = MIB // 256 if quick else MIB
        self.source = torch.zeros(256 * self.unit, dtype=torch.uint8, device=self.device)
        self.host = torch.zeros(256 * self.unit, dtype=torch.uint8, pin_memory=self.is_cuda)
        self.side = self.cuda.Stream()
        self.times = 2 if quick else 30

    def home(self, mib: int, of: int = 256) -> None:
        """Queue copies of `mib` MiB on the side stream, `of` MiB in all."""
        with self.cuda.stream(self.side):
            for begin in range(0, of * self.unit, mib * self.unit):
                end = min(begin + mib * self.unit, of * self.unit)
                self.host[begin:end].copy_(self.source[begin:end], non_blocking=True)

    def seconds(self, call: Any) -> float:
        """Return the median seconds of a call, from an idle device until it is idle again."""
        times = []
        for _ in range(self.times):
            self.cuda.synchronize()
            started = time.perf_counter()
            call()
            self.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times)


def link(quick: bool) -> Found:
    """Measure copies: GB/s by size, µs of a small copy beside queued ones, and the mutual slowdown with GEMMs."""
    copies = Copies(quick)
    nbytes = copies.source.numel()
    rates = {
        str(mib): nbytes / copies.seconds(lambda mib=mib: copies.home(mib)) / 1e9
        for mib in (1, 2, 4, 8, 16, 32, 64)
    }
    markdown(["copies of, MiB", "GB/s"], [[mib, rate] for mib, rate in rates.items()])
    waits = {str(queued): _small_us(copies, queued) for queued in (0, 32, 64, 96, 192)}
    markdown(["MiB queued", "4-byte copy beside them, µs"], [[mib, us] for mib, us in waits.items()])
    gemm = _beside_gemms(copies, quick)
    markdown(["beside", "GEMMs, ms"], [[name, ms] for name, ms in gemm.items()])
    best = max(rates.values())
    return {"GB/s": rates, "small us": waits, "gemm ms": gemm}, [
        Check("rate of 8 MiB copies, of the best", rates["8"] / best, 0.85, 0.95, at_most=False),
        Check(
            "GEMMs beside copies to the host, of GEMMs alone",
            gemm["to the host"] / gemm["nothing"],
            1.05,
            1.01,
        ),
    ]


def _small_us(copies: Copies, queued: int) -> float:
    """Return the median µs of a 4-byte copy on another stream, including the wait for it."""
    scalar = copies.source[:4].clone()
    target = torch.zeros(4, dtype=torch.uint8, pin_memory=copies.is_cuda)
    times = []
    for _ in range(copies.times):
        copies.cuda.synchronize()
        if queued:
            copies.home(32, queued)
        started = time.perf_counter()
        target.copy_(scalar, non_blocking=True)
        copies.cuda.current_stream().synchronize()
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


def _beside_gemms(copies: Copies, quick: bool) -> dict[str, float]:
    """Return the milliseconds of ten GEMMs: alone, beside copies on the device, beside copies to the host."""
    width = 64 if quick else 8192
    a = torch.randn(width, width, device=copies.device)
    a = a.to(torch.bfloat16) if copies.is_cuda else a
    b, target = torch.empty_like(a), torch.empty_like(copies.source)

    def gemms(beside: str) -> None:
        if beside == "on the device":
            with copies.cuda.stream(copies.side):
                for _ in range(10):
                    target.copy_(copies.source)
        elif beside == "to the host":
            copies.home(16)
        for _ in range(10):
            torch.mm(a, a, out=b)
        copies.cuda.current_stream().synchronize()

    return {
        beside: copies.seconds(lambda beside=beside: gemms(beside)) * 1e3
        for beside in ("nothing", "on the device", "to the host")
    }


def loading(quick: bool) -> Found:
    """Measure the host ms of a kernel's first and second launch while the device sleeps.

    Does the first wait for it?
    """
    copies = Copies(quick)
    x = torch.ones(1000, device=copies.device)
    calls = {
        "erfinv": torch.erfinv,
        "strided copy": lambda x: x[::3].clone(),
        "cast": lambda x: x.to(torch.float16),
        "allocation": lambda x: torch.empty(40 * copies.unit, dtype=torch.uint8, device=copies.device),
        "new event": lambda x: copies.cuda.Event().record(copies.cuda.current_stream()),
    }
    found = {}
    for name, call in calls.items():
        times = []
        for _ in range(2):
            copies.cuda.synchronize()
            copies.cuda._sleep(SLEEP_CYCLES // (20 if quick else 1))
            started = time.perf_counter()
            call(x)
            times.append((time.perf_counter() - started) * 1e3)
        found[name] = {"first ms": times[0], "second ms": times[1]}
    copies.cuda.synchronize()
    markdown(["call", "first, ms", "second, ms"], [[name, *each.values()] for name, each in found.items()])
    slowest = max(each["second ms"] for each in found.values())
    return found, [Check("a launch of a loaded kernel on a busy device, ms", slowest, 10.0, 1.0)]
