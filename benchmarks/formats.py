"""The cost of quantising on one core: `capd.formats.qdq` of bfloat16, by format, compared with torchao on a CPU.

    python benchmarks/formats.py [--rounds N] [--quick] [--json FILE]

The figures are MB of bfloat16 input per second of the thread's CPU, medians over interleaved rounds. One tensor has
8 MB, and one has 512 kB, which stays in the cache. torchao is compared for the MX formats. It quantises with `to_mx`
and dequantises with `to_dtype`, its CPU code. Its ratio is of the two medians. `encode` is shown for scale.

must: hifp8 1000 MB/s, fp8 200, mxfp8 200, mxfp4 140, nvfp4 90; the MX formats 1.3 x torchao.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.store.store_runner import Row, options, report, table, verdict
from capd.formats import encode, qdq

SHAPES = {"8 MB": (1024, 4096), "512 kB": (64, 4096)}
# Each measured case: a name, the format, its options.
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("hifp8", "hifp8", {}),
    ("fp8", "fp8", {}),
    ("fp8 1x128", "fp8", {"block": 128}),
    ("fp8 128x128", "fp8", {"block": (128, 128)}),
    ("mxfp8 e4m3", "mxfp8", {}),
    ("mxfp8 e5m2", "mxfp8", {"elem": "e5m2"}),
    ("mxfp8 rceil", "mxfp8", {"scale_mode": "rceil"}),
    ("mxfp6 e2m3", "mxfp6", {}),
    ("mxfp6 e3m2", "mxfp6", {"elem": "e3m2"}),
    ("mxfp4", "mxfp4", {}),
    ("nvfp4", "nvfp4", {}),
    ("nvfp4 16x16", "nvfp4", {"block": (16, 16)}),
)
MUST = {"hifp8": 1000.0, "fp8": 200.0, "mxfp8": 200.0, "mxfp4": 140.0, "nvfp4": 90.0}
MUST_BE_FASTER_THAN_TORCHAO = 1.3
# Small tensors are quantised several times per measurement, because the clock is coarse.
BURST_VALUES = 1 << 20


def torchao_mx() -> Callable[[torch.Tensor, str, str], torch.Tensor]:
    """Return torchao's quantisation and dequantisation on the CPU: (tensor, element, scale mode) to a tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torchao warns of the GPU kernels that it does not find.
        logging.disable(logging.WARNING)
        from torchao.prototype.mx_formats import mx_tensor
        from torchao.prototype.mx_formats.config import ScaleCalculationMode

        logging.disable(logging.NOTSET)
    elements = {
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "e2m3": mx_tensor.DTYPE_FP6_E2M3,
        "e3m2": mx_tensor.DTYPE_FP6_E3M2,
        "e2m1": torch.float4_e2m1fn_x2,
    }

    def there_and_back(x: torch.Tensor, elem: str, mode: str) -> torch.Tensor:
        scale, payload = mx_tensor.to_mx(x, elements[elem], 32, ScaleCalculationMode(mode))
        return mx_tensor.to_dtype(payload, scale, elements[elem], 32, x.dtype)

    return there_and_back


def ways(x: torch.Tensor, fmt: str, chosen: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {
        "qdq": lambda: qdq(x, fmt, **chosen),
        "encode": lambda: encode(x, fmt, **chosen),
    }
    if fmt.startswith("mx"):
        theirs = torchao_mx()
        elem = chosen.get("elem") or encode(x[:1], fmt).elem
        mode = chosen.get("scale_mode", "floor")
        assert torch.equal(theirs(x, elem, mode), qdq(x, fmt, **chosen)), (
            f"{fmt} {chosen} differs from torchao"
        )
        found["torchao"] = lambda: theirs(x, elem, mode)
    return found


def measure(shape: tuple[int, int], rounds: int) -> dict[str, dict[str, float]]:
    """Return the median MB/s by case and variant."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    calls = max(1, BURST_VALUES // x.numel())
    functions = {name: ways(x, fmt, chosen) for name, fmt, chosen in CASES}
    seconds: dict[tuple[str, str], list[float]] = {}
    # The first round warms up.
    for turn in range(rounds + 1):
        for name, found in functions.items():
            for way, function in found.items():
                started = time.thread_time()
                for _ in range(calls):
                    function()
                if turn:
                    seconds.setdefault((name, way), []).append((time.thread_time() - started) / calls)
    return {
        name: {way: x.nbytes / 1e6 / statistics.median(seconds[name, way]) for way in found}
        for name, found in functions.items()
    }


def checks_of(found: dict[str, dict[str, float]], size: str) -> list[Row]:
    checks = []
    for name, fmt, _ in CASES:
        rates = found[name]
        if fmt in MUST:
            checks.append(verdict(f"{name}, {size}, MB/s", rates["qdq"], MUST[fmt]))
        if "torchao" in rates:
            ratio = rates["qdq"] / rates["torchao"]
            checks.append(verdict(f"{name}, {size}, against torchao", ratio, MUST_BE_FASTER_THAN_TORCHAO))
    return checks


def main() -> None:
    args = options(__doc__, rounds=9).parse_args()
    torch.set_num_threads(1)
    shapes = {"64 kB": (8, 4096)} if args.quick else SHAPES
    rows: list[Row] = []
    measured = {size: measure(shape, args.rounds) for size, shape in shapes.items()}
    for size, found in measured.items():
        rows += [{"format": name, "input": size, **rates} for name, rates in found.items()]
    print("MB of bfloat16 input per second of one core")
    table(
        ["format", "input", "qdq", "encode", "torchao"],
        [[row.get(column) for column in ("format", "input", "qdq", "encode", "torchao")] for row in rows],
    )
    checks = [check for size, found in measured.items() for check in checks_of(found, size)]
    report({"rounds": args.rounds, "rows": rows, "checks": checks}, args.json)


if __name__ == "__main__":
    main()
