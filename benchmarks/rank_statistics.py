"""The cost of a tensor's statistics for the thread that computes them, by dtype and size, on the CPU.

    python benchmarks/rank_statistics.py [--rounds N] [--compiled] [--json FILE]

The figures are milliseconds of the thread's CPU per million elements. In every round these variants run in turn, one
thread each:

- separate: one torch reduction per statistic, over a float32 copy, and a histogram of its exponents;
- compiled: the same as one torch.compile'd function (`--compiled`), which the training job never compiles itself;
- blocks: `capd_client.devstats.formulas`, block by block;
- rank: `capd_client.devstats.fill_row`, which chooses between blocks and the histogram of bit patterns;
- daemon: numpy, `capd.store.format.statistics.summarise`;
- copy: `copy_` into another buffer, for scale.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.common import machine, report
from capd.store.format.dtypes import stored_type
from capd.store.format.statistics import summarise
from capd_client.devstats import fill_row
from capd_client.devstats.formulas import fill_from_values
from capd_client.protocol.statistics_row import ROW_VALUES

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float64", "int32")
SIZES = (4 << 10, 256 << 10, 4 << 20)
# Small tensors are reduced several times per measurement, because the clock is coarse.
BURST_ELEMENTS = 1 << 20


def separate(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return every statistic by a separate operation."""
    values = tensor.to(torch.float32)
    finite = values.isfinite()
    clean = torch.where(finite, values, 0.0)
    wide = clean.to(torch.float64)
    exponents = values.view(torch.int32).bitwise_right_shift(23).bitwise_and(255).to(torch.int64)
    low, high = (torch.where(finite, values, end) for end in (torch.inf, -torch.inf))
    return [
        values.isnan().sum(), values.isinf().sum(), (values == 0).sum(), low.amin(), high.amax(),
        clean.abs().amax(), wide.sum(), wide.square().sum(),
        torch.zeros(256, dtype=torch.int64).scatter_add_(0, exponents, torch.ones_like(exponents)),
    ]  # fmt: skip


def ways(tensor: torch.Tensor, dtype: str, compiled: bool) -> dict[str, Callable[[], Any]]:
    row = torch.empty(ROW_VALUES, dtype=torch.float64)
    bits = tensor.view(torch.uint8).numpy().view(stored_type(dtype).stored)
    buffer = torch.empty_like(tensor)
    found: dict[str, Callable[[], Any]] = {
        "separate": lambda: separate(tensor),
        "blocks": lambda: fill_from_values(tensor, row, blind=False),
        "rank": lambda: fill_row(tensor, row),
        "daemon": lambda: summarise(bits, dtype),
        "copy": lambda: buffer.copy_(tensor),
    }
    if compiled:
        function = torch.compile(separate, fullgraph=True, dynamic=True)
        found["compiled"] = lambda: function(tensor)
    return found


def measure(dtype: str, elements: int, rounds: int, compiled: bool) -> dict[str, float]:
    """Return the median milliseconds of CPU per million elements, by variant."""
    generator = torch.Generator().manual_seed(1)
    tensor = (torch.randn(elements, generator=generator) * 3).to(getattr(torch, dtype))
    calls = min(256, max(1, BURST_ELEMENTS // elements))
    times: dict[str, list[float]] = {}
    functions = ways(tensor, dtype, compiled)
    # The first round warms up.
    for turn in range(rounds + 1):
        for name, function in functions.items():
            started = time.thread_time()
            for _ in range(calls):
                function()
            if turn:
                times.setdefault(name, []).append((time.thread_time() - started) / calls)
    return {name: statistics.median(found) * 1e9 / elements for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="ELEMENTS")
    parser.add_argument("--compiled", action="store_true", help="torch.compile, too (takes a minute)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    columns: list[str] = []
    for dtype in DTYPES:
        for elements in args.sizes:
            found = measure(dtype, elements, args.rounds, args.compiled)
            if not columns:
                columns = list(found)
                print(f"{'dtype':16s}{'elements':>10s}" + "".join(f"{name:>10s}" for name in columns))
            print(
                f"{dtype:16s}{elements:10d}" + "".join(f"{found[name]:10.2f}" for name in columns), flush=True
            )
            rows.append({"dtype": dtype, "elements": elements, "ms_per_million": found})
    print("milliseconds of CPU per million elements, medians")
    report({"machine": machine(), "rows": rows}, args.json)


if __name__ == "__main__":
    main()
