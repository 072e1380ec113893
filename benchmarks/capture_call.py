"""The cost of one `capd_client.capture()` of a CPU tensor, compared with `copy_` into a rotating cold buffer.

    python benchmarks/capture_call.py [--json FILE]

The baseline is the least that any snapshot must do: copy into memory that was last touched long ago, in a buffer as
large as the arena. Baseline and capture alternate. "spaced" is one call, then a pause in which the daemon
acknowledges it. "burst" is a series of calls that leaves room in the arena, then a pause.

It also measures `capd_client.tensor_saver.save_tensor()`, tensor_saver's call, with 4 KiB, under the bound of
`capture()`, and `capd_client.scalar()` under the bound of a capture of 8 bytes. The hooks of a watched Linear in a step
that is not captured are compared with empty hooks.

must: 1.2 times the baseline + 15 microseconds (+ 20 in bursts), medians. The first release must stay within twice
that.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import capd_client
from benchmarks.kit.common import daemon, machine, percentile, report
from capd_client.tensor_saver import save_tensor

ARENA_NBYTES = 512 << 20
# The part of the arena that a burst fills, so that it never waits for the daemon.
BURST_NBYTES = 192 << 20
MAX_BURST = 64
PAUSE_TIMEOUT_S = 60.0
IDLE_CALLS = 1_000


@dataclass(frozen=True)
class Case:
    """One size: the number of spaced calls, and the number of bursts."""

    name: str
    nbytes: int
    spaced: int
    bursts: int

    @property
    def burst(self) -> int:
        """The number of calls in one burst."""
        return max(2, min(MAX_BURST, BURST_NBYTES // self.nbytes))


CASES = (
    Case("4 KiB", 4 << 10, 600, 40),
    Case("64 KiB", 64 << 10, 400, 30),
    Case("1 MiB", 1 << 20, 150, 6),
    Case("64 MiB", 64 << 20, 12, 6),
)
SCALAR = Case("8 B", 8, 600, 40)


@dataclass
class Times:
    """The seconds of each call."""

    baseline: list[float] = field(default_factory=list)
    capd: list[float] = field(default_factory=list)


class ColdBuffer:
    """A touched buffer of the arena's size that is overwritten cyclically."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8)
        self._offset = 0

    def copy(self, tensor: torch.Tensor) -> None:
        """Copy `tensor` to the place that was written longest ago."""
        if self._offset + tensor.nbytes > self._buffer.nbytes:
            self._offset = 0
        slot = self._buffer[self._offset : self._offset + tensor.nbytes]
        slot.view(tensor.dtype).copy_(tensor)
        self._offset += tensor.nbytes


def capture(tensor: torch.Tensor) -> None:
    """Make the measured call."""
    capd_client.capture(tensor, tensor_name="benchmark", layer_type="linear", component="linear", layer=0)


def save(tensor: torch.Tensor) -> None:
    """Make tensor_saver's call, as patched layers do."""
    save_tensor(
        tensor, "linear", "forward", "mxfp8", "input", 0, "pre", "linear", metadata={"use_bias": True}
    )


def scalar(tensor: torch.Tensor) -> None:
    """Record one number of a step, as a loop records its loss."""
    capd_client.scalar("loss", tensor)


def timed(call: Callable[[torch.Tensor], None], tensor: torch.Tensor, times: list[float]) -> None:
    started = time.perf_counter()
    call(tensor)
    times.append(time.perf_counter() - started)


def pause() -> None:
    """Wait until everything is acknowledged."""
    deadline = time.monotonic() + PAUSE_TIMEOUT_S
    while capd_client.counters()["in_flight"] and time.monotonic() < deadline:
        time.sleep(0.002)


def measure(case: Case, cold: ColdBuffer, ours: Callable[[torch.Tensor], None] = capture) -> dict[str, Times]:
    """Run one size, spaced and in bursts."""
    tensor = torch.randn((), dtype=torch.float64) if case is SCALAR else torch.randn(case.nbytes // 4)
    spaced, burst = Times(), Times()
    # The first call defines the key.
    ours(tensor)
    pause()
    for index in range(case.spaced):
        calls = [(cold.copy, spaced.baseline), (ours, spaced.capd)]
        # The first call has cold caches, so the order alternates.
        for call, times in calls if index % 2 else reversed(calls):
            timed(call, tensor, times)
        pause()
    for _ in range(case.bursts):
        for _ in range(case.burst):
            timed(cold.copy, tensor, burst.baseline)
        for _ in range(case.burst):
            timed(ours, tensor, burst.capd)
        pause()
    return {"spaced": spaced, "burst": burst}


def idle_hooks() -> tuple[float, float]:
    """Return microseconds per Linear call of empty hooks, and of capd's hooks in a step that is not captured."""
    model = nn.Sequential(nn.Linear(8, 8))
    linear, x = model[0], torch.randn(1, 8)
    handle = capd_client.watch(model, steps="1000000")
    # The first call determines that this step is not captured.
    output = model(x)
    ours = (next(iter(linear._forward_pre_hooks.values())), next(iter(linear._forward_hooks.values())))

    def empty(*_: object) -> None:
        return None

    def cost(before: Callable[..., Any], after: Callable[..., Any]) -> float:
        def call() -> None:
            before(linear, (x,), {})
            after(linear, (x,), output)

        return timeit.timeit(call, number=IDLE_CALLS) / IDLE_CALLS * 1e6

    costs = [(cost(empty, empty), cost(*ours)) for _ in range(200)]
    handle.remove()
    # The minima are the least disturbed calls.
    return min(c[0] for c in costs), min(c[1] for c in costs)


def summarise(case: Case, kind: str, times: Times, call: str = "capture") -> dict[str, Any]:
    """Return the medians, tenth percentiles and the bounds, in microseconds."""
    baseline, ours = (statistics.median(t) * 1e6 for t in (times.baseline, times.capd))
    must = 1.2 * baseline + 15 + (20 if kind == "burst" else 0)
    return {
        "call": call, "size": case.name, "kind": kind, "calls": len(times.capd),
        "baseline_p50_us": baseline, "capd_p50_us": ours,
        "baseline_p10_us": percentile(times.baseline, 10) * 1e6, "capd_p10_us": percentile(times.capd, 10) * 1e6,
        "difference_us": ours - baseline, "must_us": must, "twice_must_us": 2 * must,
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'call':13s}{'size':8s}{'kind':8s}{'copy p50':>10s}{'capd p50':>10s}{'copy p10':>10s}{'capd p10':>10s}"
        f"{'diff':>9s}{'must':>10s}{'2x must':>10s}   (microseconds)"
    )
    for row in rows:
        ours = row["capd_p50_us"]
        verdict = (
            "met" if ours <= row["must_us"] else "within 2x" if ours <= row["twice_must_us"] else "MISSED"
        )
        print(
            f"{row['call']:13s}{row['size']:8s}{row['kind']:8s}{row['baseline_p50_us']:10.1f}{ours:10.1f}"
            f"{row['baseline_p10_us']:10.1f}{row['capd_p10_us']:10.1f}{row['difference_us']:9.1f}"
            f"{row['must_us']:10.1f}{row['twice_must_us']:10.1f}   {verdict}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--directory", type=Path, help="where the temporary store goes (default: the system's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with daemon(args.directory, arena_nbytes=ARENA_NBYTES) as running:
        cold = ColdBuffer(ARENA_NBYTES)
        rows = [
            summarise(case, kind, times)
            for case in CASES
            for kind, times in measure(case, cold).items()
        ]  # fmt: skip
        rows += [
            summarise(CASES[0], kind, times, "save_tensor")
            for kind, times in measure(CASES[0], cold, save).items()
        ]
        rows += [
            summarise(SCALAR, kind, times, "scalar") for kind, times in measure(SCALAR, cold, scalar).items()
        ]
        idle = idle_hooks()
        counters = capd_client.counters()
        capd_client.close()
    show(rows)
    print(f"hooks in a step not captured: {idle[1] - idle[0]:.2f} us above empty ones per Linear, bound 1 us")
    dropped = sum(counters["dropped"].values())
    print(f"capd: {counters['offered']} offered, {counters['committed']} committed, {dropped} dropped")
    print(f"daemon: {running.peak_anonymous_mib:.0f} MiB anonymous at most")
    report(
        {
            "machine": machine(),
            "rows": rows,
            "idle_hooks_us": {"empty": idle[0], "capd": idle[1]},
            "counters": counters,
            "daemon_peak_anonymous_mib": running.peak_anonymous_mib,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
