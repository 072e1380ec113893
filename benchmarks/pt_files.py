"""The cost of tensor files: `capd export --to pt` compared with torch.save, `capd import` compared with torch.load.

    python benchmarks/pt_files.py [--records N] [--rounds N] [--json FILE]

Both use the same bfloat16 tensors, in dictionaries of the same layout, with equal bytes of each size. Each variant
has its own process and both CPUs. Bare torch is one loop, as in tensor_saver. "cold" means that the input files were
written to the disk and dropped from the page cache before.

An import also computes statistics, compresses, and seals a store, which torch.load does not. "load and save" is the
cost of moving tensors into other files with bare torch. The peak is the memory that a process takes beyond its
memory at the start.

must: 0.80 of the rate of torch.save and torch.load; a peak of at most 384 MiB, also for four times as many records.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import capd
from benchmarks.store.store_capd import CapdWriter, definition
from benchmarks.store.store_data import synthetic_records
from benchmarks.store.store_runner import (
    MIB,
    Meter,
    Row,
    child,
    interleave,
    medians,
    options,
    report,
    table,
    verdict,
    work_directory,
)
from capd.pt_files.dictionary import Naming
from capd.pt_files.export import export_pt
from capd.pt_files.files import find_files
from capd.pt_files.import_ import import_files, load_file
from capd.server.heap import settled_heap
from capd.store.run.options import StoreOptions
from capd.store.run.run_store import RunStore

SHAPES = {"8 MiB": (1024, 4096), "1 MiB": (256, 2048), "16 KiB": (8, 1024)}
RATE_BOUND = 0.80
# The bound holds for every size of the store.
PEAK_BOUND_MIB = 384.0
WRITES, READS = ("torch.save", "export"), ("torch.load", "load and save", "import", "import, codec fast")


def prepare(root: str, name: str, shape: list[int], records: int) -> Row:
    """Write a run and export its files."""
    place = Path(root) / name
    writer = CapdWriter(place, threads=2, codec="default")
    batch = synthetic_records(min(records, 64), (shape[0], shape[1]))
    for iteration in range(records):
        data = memoryview(batch[iteration % len(batch)]).cast("B")
        writer.put(definition(iteration % 4), data, tuple(shape), iteration)
    writer.close()
    for _ in _export(writer.run, place / "files"):
        pass
    return {"run": str(writer.run), "files": str(place / "files")}


def _export(run: Path, out: Path) -> Any:
    return export_pt("run", capd.open(run).series, out, Naming(), threads=_cpus())


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


def measure(variant: str, run: str, files: str, scratch: str, cold: bool) -> Row:
    """Measure one variant: wall and CPU seconds, raw bytes, and peak of memory. `scratch` is its own directory."""
    import torch

    store, out, found = capd.open(run), Path(scratch), find_files(Path(files))
    raw_nbytes = sum(series.raw_bytes for series in store.series)
    if cold:
        _drop(path for place in (run, files) for path in Path(place).rglob("*") if path.is_file())
    held: list[Any] = []
    if variant == "torch.save":
        held = [torch.load(file.path, weights_only=True) for file in found[:8]]
    work: dict[str, Callable[[], None]] = {
        "torch.save": lambda: _save(held, out, len(found)),
        "export": lambda: _all(_export(Path(run), out)),
        "torch.load": lambda: _load(found),
        "load and save": lambda: _load(found, out),
        "import": lambda: _import(found, out, "auto"),
        "import, codec fast": lambda: _import(found, out, "fast"),
    }
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_nbytes()
    try:
        # The commands settle the heap, too. Bare torch is not slower with it.
        with settled_heap(), Meter() as meter:
            work[variant]()
        return meter.row(raw_nbytes=raw_nbytes, peak_mib=(peak_nbytes() - before) / MIB)
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _save(held: list[Any], out: Path, count: int) -> None:
    import torch

    out.mkdir()
    for number, content in zip(range(count), itertools.cycle(held), strict=False):
        torch.save(content, out / f"{number}.pt")


def _load(found: list[Any], out: Path | None = None) -> None:
    import torch

    if out is not None:
        out.mkdir()
    for number, file in enumerate(found):
        content = torch.load(file.path, weights_only=True)
        if out is not None:
            torch.save(content, out / f"{number}.pt")


def _import(found: list[Any], out: Path, codec: str) -> None:
    out.mkdir()
    store = RunStore(out, "again", "n0", StoreOptions(codec=codec))
    outcomes = list(import_files(store, found, threads=_cpus(), load=partial(load_file, layer_base=0)))
    store.seal()
    store.close()
    assert not any(outcome.problem or outcome.already for outcome in outcomes)


def _all(written: Any) -> None:
    for _ in written:
        pass


def _drop(paths: Any) -> None:
    """Write files to the disk and drop them from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def peak_nbytes() -> int:
    """Return the highest memory of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    raise RuntimeError("no VmHWM in /proc/self/status")


def compare(
    root: Path, size: str, records: int, rounds: int, cold: bool, chosen: Sequence[str]
) -> dict[str, Row]:
    """Return the medians of the chosen variants at one size."""
    name = f"{size.replace(' ', '')}-{records}"
    prepared = root / name
    where = {"run": str(prepared / "run.zarr"), "files": str(prepared / "files")}
    if not prepared.exists():
        where = child(
            "benchmarks.pt_files:prepare", root=root, name=name, shape=SHAPES[size], records=records
        )
    variants: dict[str, Callable[[], Row]] = {
        variant: partial(
            child,
            "benchmarks.pt_files:measure",
            variant=variant,
            scratch=root / f"scratch-{at}",
            cold=cold,
            **where,
        )
        for at, variant in enumerate(chosen)
    }
    return {variant: medians(rows) for variant, rows in interleave(variants, rounds).items()}


def show(results: dict[str, dict[str, Row]]) -> list[Row]:
    """Print a line per variant. Returns the verdicts."""
    cells: list[list[object]] = []
    checks: list[tuple[str, float]] = []
    for title, rows in results.items():
        rates = {variant: row["raw_nbytes"] / row["wall_s"] / 1e6 for variant, row in rows.items()}
        for variant, row in rows.items():
            bare = rates["torch.save" if variant in WRITES else "torch.load"]
            per_cpu = row["raw_nbytes"] / row["cpu_s"] / 1e6
            cells.append(
                [f"{title}, {variant}", rates[variant], per_cpu, rates[variant] / bare, row["peak_mib"]]
            )
        if "export" in rates:
            checks.append((f"{title}: export / torch.save", rates["export"] / rates["torch.save"]))
        checks.append((f"{title}: import / torch.load", rates["import"] / rates["torch.load"]))
        checks.append((f"{title}: import / (load and save)", rates["import"] / rates["load and save"]))
    table(["tensors, variant", "MB/s", "MB/CPU s", "x bare", "peak MiB"], cells)
    return [verdict(what, value, RATE_BOUND) for what, value in checks]


def peaks(root: Path, records: int) -> list[Row]:
    """Return the verdicts on the peaks of export and import, of `records` and of four times as many."""
    return [
        verdict(f"peak MiB of {variant}, {count} records", row["peak_mib"], PEAK_BOUND_MIB, at_most=True)
        for count in (records, 4 * records)
        for variant, row in compare(root, "8 MiB", count, 1, False, ("export", "import")).items()
    ]


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--records", type=int, default=32, help="of 8 MiB, and as many bytes of smaller ones")
    args = parser.parse_args()
    records = 2 if args.quick else args.records
    sizes = {"8 MiB": records, "1 MiB": 8 * records, "16 KiB": min(512 * records, 8192)}
    if args.quick:
        sizes = {"1 MiB": 8}
    results: dict[str, dict[str, Row]] = {}
    with work_directory(args.directory) as root:
        for size, count in sizes.items():
            for cold in (False, True):
                title = f"{size}{', cold' if cold else ''}"
                results[title] = compare(
                    root, size, count, args.rounds, cold, READS if cold else (*WRITES, *READS)
                )
        checks = show(results) + peaks(root, records)
    rows = [
        {"tensors": title, "variant": variant, **row}
        for title, by_variant in results.items()
        for variant, row in by_variant.items()
    ]
    report({"rounds": args.rounds, "rows": rows, "checks": checks}, args.json)


if __name__ == "__main__":
    main()
