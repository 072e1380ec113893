"""The cost of reading a sealed store: capd, zarr-python, zarrs and tensorstore on the same files.

    python benchmarks/store/store_read.py [--records N] [--rounds N] [--json FILE]

capd writes the store. Each engine opens it in a separate process that may use 1 or 2 CPUs, and reads:

- "cold": the first record, including the opening of the handle, without the imports;
- "whole": every record in one call (capd: one after the other);
- "in order": every record in turn;
- "random" and "slice": records, and the first sixteenth of records, in random order;
- "small": random 4 KiB records out of 1 MiB chunks.

All of them check crc32c. All files are in the page cache. MB are of the returned bytes.

must: capd at least as many MB per CPU second as tensorstore.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import capd
from benchmarks.store.store_arrays import Array, installed_engines, open_array
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

RECORD, QUICK_RECORD = (1024, 4096), (256, 1024)
# 4 KiB.
SMALL_RECORD = (2, 1024)
SLICE_PART = 16
SMALL_READS = 200
OPERATIONS = ("cold", "whole", "in order", "random", "slice", "small")


Bits = NDArray[np.generic]


class CapdReader:
    """A capd Series with the methods of the other engines' arrays."""

    def __init__(self, run: Path, series: str) -> None:
        [self._series] = [found for found in capd.open(run).series if found.path == series]

    def read(self, record: int, rows: slice) -> Bits:
        return self._series.numpy(record, rows)

    def read_all(self) -> list[Bits]:
        return [self._series.numpy(record) for record in range(len(self._series))]


def prepare(root: str, shape: list[int], records: int, small_records: int, shard_nbytes: int) -> Row:
    """Write a run with one series of large and one of small records. Returns the paths of their groups."""
    writer = CapdWriter(Path(root), threads=2, codec="default", shard_nbytes=shard_nbytes)
    groups = {}
    for number, count, extents in ((0, records, tuple(shape)), (1, small_records, SMALL_RECORD)):
        data = synthetic_records(count, (extents[0], extents[1]), seed=number)
        for iteration, record in enumerate(data):
            writer.put(definition(number), memoryview(record).cast("B"), extents, iteration)
        writer.flush()
    writer.close()
    for series in capd.open(writer.run).series:
        groups["large" if series.shape[1:] == tuple(shape) else "small"] = series.path
    return {"run": str(writer.run), **groups}


def measure(engine: str, run: str, large: str, small: str, threads: int) -> Row:
    """Run all operations of one engine. Returns CPU and wall seconds and returned bytes of each."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    open_series = partial(_open, engine, Path(run), threads)
    # The first read imports modules and starts thread pools.
    open_series(small).read(0, slice(None))
    meters: dict[str, tuple[Meter, int]] = {}
    with Meter() as meter:
        array = open_series(large)
        nbytes = array.read(0, slice(None)).nbytes
    meters["cold"] = meter, nbytes
    count, height, *_ = _shape(run, large)
    order = random.Random(0).sample(range(count), count)
    with Meter() as meter:
        nbytes = sum(np.asarray(part).nbytes for part in _whole(array))
    meters["whole"] = meter, nbytes
    for name, numbers, rows in (
        ("in order", range(count), slice(None)),
        ("random", order, slice(None)),
        ("slice", order, slice(0, height // SLICE_PART)),
    ):
        meters[name] = _read_each(array, numbers, rows)
    array = open_series(small)
    count = _shape(run, small)[0]
    numbers = random.Random(1).sample(range(count), min(SMALL_READS, count))
    meters["small"] = _read_each(array, numbers, slice(None))
    return {
        f"{name} {field}": value
        for name, (meter, nbytes) in meters.items()
        for field, value in (("cpu_s", meter.cpu_s), ("wall_s", meter.wall_s), ("nbytes", nbytes))
    }


def _open(engine: str, run: Path, threads: int, series: str) -> Array | CapdReader:
    if engine == "capd":
        return CapdReader(run, series)
    return open_array(engine, run / series / "data", threads)


def _shape(run: str, series: str) -> tuple[int, ...]:
    [found] = [found for found in capd.open(run).series if found.path == series]
    return found.shape


def _whole(array: Array | CapdReader) -> Sequence[Any]:
    result = array.read_all()
    return result if isinstance(result, list) else [result]


def _read_each(array: Array | CapdReader, numbers: Sequence[int], rows: slice) -> tuple[Meter, int]:
    with Meter() as meter:
        nbytes = sum(array.read(number, rows).nbytes for number in numbers)
    return meter, nbytes


def show(results: dict[int, dict[str, Row]]) -> list[Row]:
    """Print one line per operation, threads and engine. Returns the verdicts."""
    cells: list[list[object]] = []
    ratios: dict[str, list[list[float]]] = {}
    for operation in OPERATIONS:
        for threads, engines in results.items():
            reference = engines["tensorstore"]
            for engine, row in engines.items():
                cpu, wall = (row[f"{operation} {field}"] for field in ("cpu_s", "wall_s"))
                against = [
                    reference[f"{operation} {field}"] / row[f"{operation} {field}"]
                    for field in ("cpu_s", "wall_s")
                ]
                megabytes = row[f"{operation} nbytes"] / 1e6
                cells.append(
                    [f"{operation}, {threads} CPU, {engine}", megabytes / cpu, megabytes / wall, *against]
                )
                if engine == "capd":
                    ratios.setdefault(operation, []).append(against)
    table(["read", "MB/CPU s", "MB/s", "x tensorstore, CPU", "wall"], cells)
    checks = []
    for operation, pairs in ratios.items():
        for field, column in zip(("CPU", "wall"), zip(*pairs, strict=True), strict=True):
            checks.append(
                verdict(f"{operation}: capd / tensorstore, {field}", statistics.median(column), 1.0)
            )
    return checks


def main() -> None:
    parser = options(__doc__, rounds=5, directory=memory_directory())
    parser.add_argument("--records", type=int, default=32, help="of 8 MiB")
    args = parser.parse_args()
    sizes: Row = {"shape": RECORD, "records": args.records, "small_records": 8192, "shard_nbytes": 128 * MIB}
    cpus: Sequence[int] = (1, 2)
    if args.quick:
        sizes = {"shape": QUICK_RECORD, "records": 8, "small_records": 512, "shard_nbytes": 2 * MIB}
        cpus = (2,)
    engines = ("capd", *installed_engines())
    results: dict[int, dict[str, Row]] = {}
    with work_directory(args.directory) as root:
        store = child("benchmarks.store.store_read:prepare", root=root, **sizes)
        for threads in cpus:
            variants: dict[str, Callable[[], Row]] = {
                engine: partial(
                    child, "benchmarks.store.store_read:measure", engine=engine, threads=threads, **store
                )
                for engine in engines
            }
            measured = interleave(variants, args.rounds)
            results[threads] = {engine: medians(rows) for engine, rows in measured.items()}
    checks = show(results)
    rows = [
        {"threads": threads, "engine": engine, **row}
        for threads, by_engine in results.items()
        for engine, row in by_engine.items()
    ]
    report({"rounds": args.rounds, "rows": rows, "checks": checks}, args.json)


if __name__ == "__main__":
    main()
