"""Measures the constants of a GPU that `device_model.py` needs: the host's time for each call, rates, and latencies.

    python benchmarks/gpu/gpu_constants.py [--json FILE] [--quick]

It prints a flat JSON object whose names end with their units, and uses nothing of capd. Without a CUDA device it
ends with code 2. With `--quick` it runs on stand-ins for streams, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.gpu_runtime import NO_GPU, runtime
from benchmarks.gpu.gpu_tables import markdown
from benchmarks.kit.common import percentile

__all__ = ["constants"]

KIB, MIB = 1 << 10, 1 << 20
# About: the real sleep is measured.
CYCLES_PER_MS = 2_000_000


class Bench:
    """One GPU, or the CPU in its place, and the cost of calls to it. `quick`: a few repetitions of tiny sizes."""

    def __init__(self, quick: bool) -> None:
        self.cuda = runtime()
        self.is_cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.is_cuda else torch.device("cpu")
        self.count = 20 if quick else 1000
        # Sizes are divided by it.
        self.scale = 64 if quick else 1
        self.side = self.cuda.Stream()

    def tensor(self, nbytes: int, pinned: bool = False) -> torch.Tensor:
        """Return bytes of zeros, on the device or page-locked on the host."""
        if pinned:
            return torch.zeros(nbytes // self.scale, dtype=torch.uint8, pin_memory=self.is_cuda)
        return torch.zeros(nbytes // self.scale, dtype=torch.uint8, device=self.device)

    def call_us(self, call: Callable[[], object]) -> float:
        """Return the median µs of the host for a call that does not wait for the device."""
        times = []
        for number in range(self.count):
            if number % 50 == 0:
                self.cuda.synchronize()
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        self.cuda.synchronize()
        return statistics.median(times) * 1e6

    def gbps(self, call: Callable[[], object], nbytes: int, times: int) -> float:
        """Return the rate in 10⁹ bytes per second of a call that is made `times` times in a row."""
        call()
        self.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            call()
        self.cuda.synchronize()
        return nbytes / self.scale * times / (time.perf_counter() - started) / 1e9


def constants(quick: bool) -> dict[str, float]:
    """Return all constants. The names are those of a model's fields."""
    bench = Bench(quick)
    return {**_calls(bench), **_rates(bench), **_latencies(bench), **_reacquiring(bench)}


def _calls(bench: Bench) -> dict[str, float]:
    cuda, side = bench.cuda, bench.side
    here, event, small = cuda.current_stream(), cuda.Event(), bench.tensor(256 * KIB)
    target, host = torch.empty_like(small), bench.tensor(256 * KIB, pinned=True)
    event.record(here)
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None) if bench.is_cuda else None

    def issue() -> None:
        with cuda.stream(side):
            host.copy_(small, non_blocking=True)

    return {
        "current_stream_us": bench.call_us(cuda.current_stream),
        "raw_stream_us": bench.call_us(lambda: raw(0)) if raw is not None else 0.0,
        "capture_check_us": bench.call_us(cuda.is_current_stream_capturing),
        "event_create_record_us": bench.call_us(lambda: cuda.Event().record(here)),
        "event_record_us": bench.call_us(lambda: event.record(here)),
        "event_query_us": bench.call_us(event.query),
        "wait_event_us": bench.call_us(lambda: side.wait_event(event)),
        "copy_d2d_call_us": bench.call_us(lambda: target.copy_(small)),
        "d2h_issue_us": bench.call_us(issue),
        "kernel_launch_us": bench.call_us(lambda: small.zero_()),
    }


def _rates(bench: Bench) -> dict[str, float]:
    large, target = bench.tensor(256 * MIB), bench.tensor(256 * MIB)
    host = bench.tensor(256 * MIB, pinned=True)
    times = 2 if bench.scale > 1 else 40
    found = {"d2d_gbps": bench.gbps(lambda: target.copy_(large), 256 * MIB, times)}
    for mib in (1, 2, 4, 8, 16, 32, 64):
        nbytes = mib * MIB // bench.scale
        pieces = list(zip(host.split(nbytes), large.split(nbytes), strict=True))

        def home(pieces: list[tuple[torch.Tensor, torch.Tensor]] = pieces) -> None:
            for host_piece, piece in pieces:
                host_piece.copy_(piece, non_blocking=True)

        found[f"d2h_{mib}_mib_gbps"] = bench.gbps(home, 256 * MIB, max(1, times // 4))
    return found


def _latencies(bench: Bench) -> dict[str, float]:
    """Measure the extra delay of a blocking wait over a spinning one, and a 4-byte copy on an idle link."""
    cuda = bench.cuda
    waits: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * max(10, bench.count // 20)):
        blocking = number % 2 == 0
        event = cuda.Event(blocking=blocking)
        cuda.synchronize()
        started = time.perf_counter()
        cuda._sleep(CYCLES_PER_MS)
        event.record(cuda.current_stream())
        event.synchronize()
        waits[blocking].append(time.perf_counter() - started)
    scalar, host, times = bench.tensor(64 * 64), bench.tensor(64 * 64, pinned=True), []
    for _ in range(max(10, bench.count // 10)):
        cuda.synchronize()
        started = time.perf_counter()
        host.copy_(scalar, non_blocking=True)
        cuda.current_stream().synchronize()
        times.append(time.perf_counter() - started)
    return {
        "event_wake_us": (statistics.median(waits[True]) - statistics.median(waits[False])) * 1e6,
        "copy_4_kib_us": statistics.median(times) * 1e6,
    }


def _reacquiring(bench: Bench) -> dict[str, float]:
    """Measure a call that releases and retakes the interpreter's lock, beside a thread that computes all the time."""
    event, busy = bench.cuda.Event(), threading.Event()
    event.record(bench.cuda.current_stream())
    bench.cuda.synchronize()

    def compute() -> None:
        small = torch.zeros(16)
        while not busy.is_set():
            for _ in range(50):
                # The call releases the lock, as a training loop does.
                small.add_(1)
            sum(range(200))

    found = {}
    for name in ("alone", "beside_busy"):
        thread = threading.Thread(target=compute)
        if name == "beside_busy":
            thread.start()
        times = []
        for _ in range(bench.count):
            started = time.perf_counter()
            # The event has happened, so the call waits only for the lock.
            event.synchronize()
            times.append((time.perf_counter() - started) * 1e6)
        busy.set()
        if thread.ident is not None:
            thread.join()
        found |= {f"gil_{name}_p50_us": percentile(times, 50), f"gil_{name}_p99_us": percentile(times, 99)}
        found[f"gil_{name}_max_us"] = max(times)
        busy.clear()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write them there as well")
    parser.add_argument("--table", action="store_true", help="print Markdown instead of JSON")
    parser.add_argument("--quick", action="store_true", help="shows that it runs, not how fast")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.quick:
        print("no CUDA device was found: nothing was measured", file=sys.stderr)
        raise SystemExit(NO_GPU)
    found: dict[str, Any] = constants(args.quick)
    text = json.dumps(found, indent=1)
    if args.table:
        markdown(["constant", "value"], [[name, value] for name, value in found.items()])
    else:
        print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
