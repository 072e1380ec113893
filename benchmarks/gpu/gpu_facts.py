"""The facts about a GPU that decide how capd should treat it. Each takes a few seconds.

    python benchmarks/gpu/gpu_facts.py {machine,lock,border,link,loading,rows} [--json FILE] [--quick]

- machine: versions, link, sockets.
- lock: how long page-locking delays other threads, by size.
- border: whether one copy may cross from one page lock into another.
- link: rates by size of the copies, and the delay of a small copy beside them.
- loading: whether the first launch of a kernel waits for all queued work.
- rows: the kernel of the statistics, the only fact that needs capd.

Without a CUDA device it ends with code 2. With `--quick` it shows on the CPU that it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.gpu_facts_copies import link, loading
from benchmarks.gpu.gpu_facts_lock import border, lock
from benchmarks.gpu.gpu_facts_machine import machine, rows
from benchmarks.gpu.gpu_runtime import NO_GPU
from benchmarks.gpu.gpu_tables import Check, judged

FACTS: dict[str, Callable[[bool], tuple[dict[str, Any], list[Check]]]] = {
    "machine": machine, "lock": lock, "border": border, "link": link, "loading": loading, "rows": rows,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fact", choices=[*FACTS])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--quick", action="store_true", help="shows that it runs")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.quick:
        print("no CUDA device was found: nothing was measured", file=sys.stderr)
        raise SystemExit(NO_GPU)
    found, checks = FACTS[args.fact](args.quick)
    verdicts = judged(checks) if checks else []
    if args.json is not None:
        args.json.write_text(json.dumps({args.fact: found, "checks": verdicts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
