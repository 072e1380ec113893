"""The speed of `capd compare` on workers of Dask against one process.

    python benchmarks/cluster/workers.py [--mb N] [--rounds N] [--json FILE]

The run has bfloat16 records of 4 MiB, in memory, and five formats are measured, in tasks of 64 MiB. "1 process" is one
thread without Dask. The others are Dask's workers, one thread each, started before; with capd's setting of the heap,
and as Dask's nanny leaves it. Each variant has its own processes. Ratios are of medians over interleaved rounds. All
results are equal.

must, on a quiet machine of two cores: 2 workers at least 1.5 times as fast as 1 process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.cluster.gathering import RECORD_NBYTES, TASK_NBYTES
from benchmarks.store.store_runner import (
    Row,
    child,
    interleave,
    medians,
    memory_directory,
    options,
    report,
    table,
    verdict,
    work_directory,
)

LEAST_SPEEDUP = 1.5
VARIANTS = {
    "1 worker": (1, True),
    "2 workers": (2, True),
    "1 worker, heap as Dask has it": (1, False),
    "2 workers, heap as Dask has it": (2, False),
}


def main() -> None:
    parser = options(__doc__, rounds=3, directory=memory_directory())
    parser.add_argument("--mb", type=int, default=1024, help="of raw bfloat16 in the run")
    args = parser.parse_args()
    records = 4 if args.quick else max(16, args.mb * 10**6 // RECORD_NBYTES)
    module = "benchmarks.cluster.gathering"
    with work_directory(args.directory) as root:
        run = child(f"{module}:prepare", root=str(root), records=records)["run"]
        variants: dict[str, Callable[[], Row]] = {"1 process": partial(child, f"{module}:here", run=run)}
        for name, (workers, settles) in VARIANTS.items():
            variants[name] = partial(
                child,
                f"{module}:there",
                run=run,
                workers=workers,
                settles_heap=settles,
                task_nbytes=min(TASK_NBYTES, records // 4 * RECORD_NBYTES),
            )
        rows = interleave(variants, args.rounds)
    results = {name: medians(each) for name, each in rows.items()}
    assert len({row["sqnr_db"] for each in rows.values() for row in each}) == 1
    alone = results["1 process"]["wall_s"]
    table(
        ["", "wall s", "MB/s", "workers' CPU s", "against 1 process"],
        [
            [
                name,
                row["wall_s"],
                records * RECORD_NBYTES / row["wall_s"] / 1e6,
                row["workers_cpu_s"],
                alone / row["wall_s"],
            ]
            for name, row in results.items()
        ],
    )
    checks = [verdict("2 workers against 1 process", alone / results["2 workers"]["wall_s"], LEAST_SPEEDUP)]
    shown = [{"variant": name, **row} for name, row in results.items()]
    report(
        {"rounds": args.rounds, "mb": records * RECORD_NBYTES / 1e6, "rows": shown, "checks": checks},
        args.json,
    )


if __name__ == "__main__":
    main()
