"""The cost of capturing from a GPU: calls, the link, training steps, device memory, small tensors, others' copies.

    python benchmarks/gpu/gpu_capture.py [--rounds N] [--only SECTION ...] [--link-gbps X] [--json FILE]

It prints Markdown tables for docs/measurements.md, and takes about ten minutes on one GPU with 64 GiB of host
memory. Every section runs in a separate process with its own daemon. Without a CUDA device it ends with code 2. With
`--quick` all of it runs on the CPU, and its figures mean nothing.

must: capture() <= 40 us p50 without a synchronisation; captures >= 16 MiB at >= 85 % of a plain pinned copy's rate,
also beside a training thread that computes in Python; a training step <= +2 % with captures of at most half of the
link's bytes and 0 drops under policy block; device memory flat. Drops under policy drop are only shown, because the
host's lead over the device must fit into the ring. `gpu_tables.py` has all bounds, including the desired ones.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.gpu_runtime import NO_GPU
from benchmarks.gpu.gpu_tables import DROP, SHOWN, judged
from benchmarks.store.store_runner import Row, child, options, report

KIB, MIB = 1 << 10, 1 << 20


class Sections:
    """The measurements of each section by its name. `link_gbps` is the value of the transfers, once they have run."""

    def __init__(self, place: str, quick: bool, rounds: int, link_gbps: float) -> None:
        self._common: dict[str, Any] = {"place": place, "quick": quick}
        self._quick = quick
        self._rounds = rounds
        self.link_gbps = link_gbps

    def measure(self, name: str) -> Any:
        """Return the result of a section as JSON values."""
        ways: dict[str, Callable[[], Any]] = {
            "constants": lambda: child("benchmarks.gpu.gpu_constants:constants", quick=self._quick),
            "calls": self._calls,
            "transfer": self._transfer,
            "step": self._step,
            "host-bound": self._host_bound,
            "interference": lambda: child("benchmarks.gpu.gpu_steps:interference", **self._common),
        }
        return ways[name]() if name in ways else child(f"benchmarks.gpu.gpu_sections:{name}", **self._common)

    def _calls(self) -> dict[str, Row]:
        return {
            mode: child("benchmarks.gpu.gpu_sections:calls", mode=mode, **self._common)
            for mode in ("tensor", "stats")
        }

    def _transfer(self) -> dict[str, dict[str, list[Row]]]:
        sizes = [64 * KIB] if self._quick else [MIB, 16 * MIB, 64 * MIB]
        found = {
            beside: {
                str(size): [
                    child("benchmarks.gpu.gpu_sections:transfer", size=size, beside=beside, **self._common)
                    for _ in range(self._rounds)
                ]
                for size in sizes
            }
            for beside in ("idle", "busy")
        }
        self.link_gbps = statistics.median(row["plain GB/s"] for row in found["idle"][str(sizes[-1])])
        return found

    def _step(self) -> dict[str, Row]:
        variants = {
            "block": ("block", False, {}),
            "block, loss.item()": ("block", True, {}),
            "block, held": ("block", False, {"CAPD_SNAPSHOT": "auto"}),
            "wait for the ring": ("drop", False, {"CAPD_RING": "wait"}),
            DROP: ("drop", False, {}),
        }
        return {
            name: child(
                "benchmarks.gpu.gpu_steps:step",
                link_gbps=self.link_gbps,
                rounds=1 if name == DROP else self._rounds,
                policy=policy,
                item=item,
                settings=settings,
                **self._common,
            )
            for name, (policy, item, settings) in variants.items()
        }

    def _host_bound(self) -> list[Row]:
        sizes = [64 * KIB] if self._quick else [256 * KIB, MIB, 4 * MIB]
        return [
            child(
                "benchmarks.gpu.gpu_steps:host_bound",
                link_gbps=self.link_gbps,
                rounds=self._rounds,
                size=size,
                **self._common,
            )
            for size in sizes
        ]


def main() -> None:
    parser = options(__doc__, rounds=2)
    parser.add_argument("--only", nargs="+", choices=[*SHOWN], default=[*SHOWN], help="these sections")
    parser.add_argument("--link-gbps", type=float, default=25.0, help="the link's, where it is not measured")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.quick:
        print(
            "no CUDA device was found: nothing was measured. --quick shows on the CPU that it runs",
            file=sys.stderr,
        )
        raise SystemExit(NO_GPU)
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU: the CPU in its place"
    print(f"{name}, torch {torch.__version__}\n")
    sections = Sections(args.directory, args.quick, args.rounds, args.link_gbps)
    found: Row = {"device": name}
    checks = []
    for section in args.only:
        found[section] = sections.measure(section)
        checks += SHOWN[section](found[section])
    report({**found, "link GB/s": sections.link_gbps, "checks": judged(checks)}, args.json)


if __name__ == "__main__":
    main()
