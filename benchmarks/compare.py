"""The cost of `capd compare`: the error of each format on a run, and two runs record by record.

    python benchmarks/compare.py [--mb N] [--rounds N] [--json FILE]

The run has bfloat16 records of 8 MB, in memory. Each variant has its own process and all CPUs. The figures are MB of
raw bfloat16 per second of wall time and of CPU, medians over interleaved rounds. "nothing" reads the run, checks it
and counts its values, as each variant with formats does. Two runs count MB of both. The peak is the memory that a
process takes beyond its memory at the start.

must: a peak of at most 384 MiB, whatever the size of the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.pt_files import peak_nbytes
from benchmarks.store.store_capd import CapdWriter, definition
from benchmarks.store.store_data import synthetic_records
from benchmarks.store.store_runner import (
    MIB,
    Meter,
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
from capd.analyze.format_choice import choices
from capd.analyze.groups import Groups
from capd.analyze.scale_sweep import SWEEP_ELEMENTS, sweep_scales
from capd.io.items import items_of_runs
from capd.io.pairs import matched
from capd.io.sides import run_side
from capd.report.differences import Differences, compare_each, compared_here
from capd.report.gather import GatheredRecords, gather
from capd.server.heap import settled_heap

SHAPE = (1024, 4096)
FORMATS = ("", "hifp8", "fp8", "mxfp8", "mxfp8:axis=-2", "mxfp6", "mxfp4", "nvfp4", "nvfp4:16x16")
ALL = "fp8,mxfp8,mxfp4,nvfp4,hifp8"
PEAK_BOUND_MIB = 384.0


def prepare(root: str, name: str, records: int) -> Row:
    """Write a run of records of 8 MB."""
    place = Path(root) / name
    writer = CapdWriter(place, threads=2, codec="default")
    batch = synthetic_records(min(records, 8), SHAPE)
    for iteration in range(records):
        data = memoryview(batch[iteration % len(batch)]).cast("B")
        writer.put(definition(iteration % 4), data, SHAPE, iteration)
    writer.close()
    return {"run": str(writer.run)}


def measure(variant: str, run: str) -> Row:
    """Measure one variant: wall and CPU seconds, raw bytes, and peak of memory."""
    import torch

    torch.set_num_threads(1)
    torch.ones(64, 64).to(torch.bfloat16).abs().amax()
    work: dict[str, Callable[[], int]] = {"two runs": lambda: _pairs(run), "sweep": lambda: _sweep(run)}
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_nbytes()
    # The command does the same.
    with settled_heap(), Meter() as meter:
        raw_nbytes = work[variant]() if variant in work else _formats(run, variant)
    return meter.row(raw_nbytes=raw_nbytes, peak_mib=(peak_nbytes() - before) / MIB)


def _gathered(run: str, **asked: Any) -> GatheredRecords:
    found = GatheredRecords(groups=Groups({(): True, ("tensor_name",): True}))
    for seen in gather(items_of_runs([Path(run)], []).found, found, threads=_cpus(), **asked):
        assert isinstance(seen, int)
    return found


def _formats(run: str, formats: str) -> int:
    chosen = choices(formats) if formats else ()
    whole = _gathered(run, choices=chosen).groups.whole()
    assert len(whole.errors) == len(chosen)
    return whole.raw_bytes


def _sweep(run: str) -> int:
    whole = _gathered(run).groups.whole()
    assert whole.distribution is not None
    assert all(sweep_scales(whole.distribution, element) for element in SWEEP_ELEMENTS)
    return whole.raw_bytes


def _pairs(run: str) -> int:
    sides = run_side(Path(run), []), run_side(Path(run), [])
    pairing = matched(sides[0].entries()[0], sides[1].entries()[0], ())
    found = Differences(*sides, by=("tensor_name",))
    seen = list(compare_each(pairing, found, compared_here(*sides, _cpus()), until_first=False))
    assert found.whole.identical == len(seen)
    return sum(nbytes for nbytes in seen if isinstance(nbytes, int))


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


def main() -> None:
    parser = options(__doc__, rounds=3, directory=memory_directory())
    parser.add_argument("--mb", type=int, default=256, help="of raw bfloat16 in the run")
    args = parser.parse_args()
    records = 2 if args.quick else max(4, args.mb // 8)
    names = [*FORMATS, ALL, "sweep", "two runs"]
    with work_directory(args.directory) as root:
        runs = {count: child("benchmarks.compare:prepare", root=root, name=str(count), records=count)["run"]
                for count in (records, 3 * records)}  # fmt: skip
        variants: dict[str, Callable[[], Row]] = {
            name: partial(child, "benchmarks.compare:measure", variant=name, run=runs[records])
            for name in names
        }
        results = {name: medians(rows) for name, rows in interleave(variants, args.rounds).items()}
        peaks = {(name, records): results[name]["peak_mib"] for name in (ALL, "two runs")}
        for name in (ALL, "two runs"):
            peaks[name, 3 * records] = child(
                "benchmarks.compare:measure", variant=name, run=runs[3 * records]
            )["peak_mib"]
    cells = []
    for name, row in results.items():
        rates = [row["raw_nbytes"] / row[clock] / 1e6 for clock in ("wall_s", "cpu_s")]
        cells.append([name or "nothing", *rates, row["peak_mib"]])
    table(["formats", "MB/s", "MB/CPU s", "peak MiB"], cells)
    checks = [
        verdict(f"peak MiB of {name}, {count} records", peak, PEAK_BOUND_MIB, at_most=True)
        for (name, count), peak in peaks.items()
    ]
    rows = [{"variant": name, **row} for name, row in results.items()]
    report({"rounds": args.rounds, "rows": rows, "checks": checks}, args.json)


if __name__ == "__main__":
    main()
