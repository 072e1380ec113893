"""The cost of a check: captured bfloat16 tensors per CPU second, and the memory beside them.

    python benchmarks/products/check.py [--rounds N] [--quick] [--json FILE]

The six tensors of a linear layer of 4096 x 4096 x 4096 are in memory, so reading them is not in the figures. The rate
is their bytes by the process's CPU time with one thread, medians over rounds. The memory is the peak beside the
tensors, in a process of its own.

must: 100 MB/s; 384 MiB.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from benchmarks.store.store_runner import MIB, Row, child, options, report, table, verdict

LEAST_MB, MOST_MIB = 100, 384


def tensors_of(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    scales = {"x": 1.0, "w": 0.02, "g": 1e-4}
    found = {
        name: torch.randn(size, size, generator=generator).mul_(scale).to(torch.bfloat16)
        for name, scale in scales.items()
    }
    x, w, g = found.values()
    return {**found, "y": x @ w.t(), "dx": g @ w, "dw": g.t() @ x}


def checked(tensors: dict[str, torch.Tensor]) -> None:
    from capd.check.judging import ProductLimits, judged
    from capd.check.precision import precision_of
    from capd.check.residual import Product

    precision = precision_of(["bfloat16"])
    assert precision is not None
    x, w, g = (tensors[name] for name in "xwg")
    for name, (a, b) in {"y": (x, w.t()), "dx": (g, w), "dw": (g.t(), x)}.items():
        found = judged(
            Product(a, b, tensors[name], torch.float32, torch.bfloat16), precision, ProductLimits()
        )
        assert not found.is_beyond, (name, found)


def peak(size: int) -> Row:
    """Return the MiB that a check takes beside the tensors. Runs in a process of its own."""
    import resource

    torch.set_num_threads(1)
    checked(tensors_of(128))
    tensors = tensors_of(size)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")
    checked(tensors)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"mib": (int(status["VmHWM"].split()[0]) * 1024 - before) / MIB}


def main() -> None:
    args = options(__doc__, rounds=5).parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    checks: list[Row] = []
    for size in (256,) if args.quick else (1024, 4096):
        tensors, seconds = tensors_of(size), []
        for turn in range(args.rounds + 1):
            started = time.process_time()
            checked(tensors)
            if turn or not args.rounds:
                seconds.append(time.process_time() - started)
        # Each product is checked against two tensors that others share: all six are counted once.
        rate = sum(one.nbytes for one in tensors.values()) / statistics.median(seconds) / 1e6
        rows.append({"size": size, "cpu s": statistics.median(seconds), "MB/s": rate})
        if not args.quick:
            checks.append(verdict(f"MB/s of captured bfloat16 at {size}³", rate, LEAST_MB))
    table(list(rows[0]), [list(row.values()) for row in rows])
    found = child("benchmarks.products.check:peak", size=256 if args.quick else 4096)
    rows.append({"size": 4096, "MiB": found["mib"]})
    checks.append(verdict("MiB beside the tensors", found["mib"], MOST_MIB, at_most=True))
    report({"rounds": args.rounds, "rows": rows, "checks": checks}, args.json)


if __name__ == "__main__":
    main()
