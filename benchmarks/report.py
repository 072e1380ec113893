"""The speed of `capd report -o report.html`: statistics, channels, five formats and the page, by size of the records.

    python benchmarks/report.py [--mb N] [--rounds N] [--json FILE]

The runs have bfloat16 records, in memory. Each variant is the whole command with two workers in its own process, except
the imports. The figures are MiB of raw bfloat16 per second of wall time and of CPU, medians over interleaved rounds.
"5 %" counts the bytes of the whole run.

must: 60 MiB/s with records of 8 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

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

SHAPES = {"8 MiB": (1024, 4096), "1 MiB": (256, 2048), "128 KiB": (64, 1024)}
VARIANTS = {"five formats": (), "no formats": ("--formats", "none"), "5 %": ("--sample", "5%")}
RATE_BOUND_MIB = 60.0


def prepare(root: str, size: str, nbytes: int) -> Row:
    """Write a run of four series with records of one size."""
    shape = SHAPES[size]
    writer = CapdWriter(Path(root) / size.replace(" ", ""), threads=2, codec="default")
    count = max(8, nbytes // (2 * shape[0] * shape[1]))
    batch = synthetic_records(min(count, 8), shape)
    for number in range(count):
        data = memoryview(batch[number % len(batch)]).cast("B")
        writer.put(definition(number % 4), data, shape, number)
    writer.close()
    return {"run": str(writer.run), "raw_nbytes": count * batch[0].nbytes}


def measure(run: str, raw_nbytes: int, arguments: list[str]) -> Row:
    """Measure one report: wall and CPU seconds."""
    import torch

    # They are imported here, because an import is no work on records.
    import capd.analyze.measure
    import capd.report.page.html  # noqa: F401
    from capd.cli.app import main as command

    torch.ones(64, 64).to(torch.bfloat16).abs().amax()
    out = Path(run).with_name("report.html")
    code = None
    with Meter() as meter:
        try:
            command(["report", run, "-o", str(out), "--force", "--workers", "2", "--json", *arguments])
        except SystemExit as ended:
            code = ended.code
    assert code == 0
    return meter.row(raw_nbytes=raw_nbytes)


def main() -> None:
    parser = options(__doc__, rounds=3, directory=memory_directory())
    parser.add_argument("--mb", type=int, default=384, help="of raw bfloat16 in each run")
    args = parser.parse_args()
    nbytes = MIB if args.quick else args.mb * MIB
    with work_directory(args.directory) as root:
        runs = {
            size: child("benchmarks.report:prepare", root=root, size=size, nbytes=nbytes) for size in SHAPES
        }
        variants: dict[str, Callable[[], Row]] = {
            f"{size}, {name}": partial(child, "benchmarks.report:measure", arguments=arguments, **run)
            for size, run in runs.items()
            for name, arguments in VARIANTS.items()
        }
        results = {name: medians(rows) for name, rows in interleave(variants, args.rounds).items()}
    rates = {
        name: {clock: row["raw_nbytes"] / row[clock] / MIB for clock in ("wall_s", "cpu_s")}
        for name, row in results.items()
    }
    table(
        ["records, measured", "MiB/s", "MiB/CPU s"], [[name, *rate.values()] for name, rate in rates.items()]
    )
    judged = "8 MiB, five formats"
    checks = [verdict(f"MiB/s of {judged}", rates[judged]["wall_s"], RATE_BOUND_MIB)]
    rows = [{"variant": name, **row} for name, row in results.items()]
    report({"rounds": args.rounds, "rows": rows, "checks": checks}, args.json)


if __name__ == "__main__":
    main()
