"""The time to seal thousands of live series, on few descriptors, as at a daemon's shutdown.

    python benchmarks/store/store_seal.py [--series N] [--rounds N] [--json FILE]

Every series gets one or four records, round robin, so that descriptors come and go. All records are committed. Then
`Pipeline.seal` makes them visible to plain Zarr readers. Files are in `--directory`, because sealing syncs them.

Files stay until the end (6 GiB per round with 5,000 series). Before ext4 creates a file, it inspects one by one the
inodes deleted in the last minutes. So the deletions of one measurement would slow down the next.

must: 10 s of wall time for 5,000 series.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.store.store_capd import CapdWriter, definition
from benchmarks.store.store_data import synthetic_records
from benchmarks.store.store_runner import (
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

COLUMNS = 1024
OPEN_FILES = 512
MUST_S = 10.0
MUST_SERIES = 5_000


@dataclass(frozen=True)
class Case:
    """Series with `each` records of `kib` KiB."""

    kib: int
    each: int
    series: int

    @property
    def name(self) -> str:
        """The name in the table."""
        return f"{self.series} series of {self.each} x {self.kib} KiB"


def seal(place: str, case: Row) -> Row:
    """Fill and seal one run. Returns the times of both."""
    this = Case(**case)
    shape = (this.kib // 2, COLUMNS)
    data = synthetic_records(1, (4 * shape[0] + 512, COLUMNS))[0]
    root = Path(tempfile.mkdtemp(dir=place))
    warm = CapdWriter(root / "warm", threads=1, codec="default")
    warm.put(definition(0), memoryview(data[: shape[0]]).cast("B"), shape)
    warm.close()
    writer = CapdWriter(root / "capd", threads=1, codec="default", open_files=OPEN_FILES)
    defines = [definition(number) for number in range(this.series)]
    with Meter() as append:
        for number in range(this.series * this.each):
            first = number % (len(data) - shape[0])
            record = memoryview(data[first : first + shape[0]]).cast("B")
            writer.put(defines[number % this.series], record, shape, number // this.series)
        writer.flush()
    with Meter() as sealing:
        writer.seal()
    with Meter() as closing:
        writer.close()
    records = this.series * this.each
    return {
        "name": this.name, "records": records, "stored": writer.stored_nbytes(),
        "append_us": append.cpu_s / records * 1e6, "append_wall_us": append.wall_s / records * 1e6,
        "seal_s": sealing.wall_s, "seal_cpu_s": sealing.cpu_s, "close_s": closing.wall_s,
    }  # fmt: skip


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--series", type=int, default=MUST_SERIES)
    args = parser.parse_args()
    series, sizes, counts = args.series, [4, 64, 300], [1, 4]
    if args.quick:
        series, sizes, counts = 12, [4, 300], [2]
    cases = [Case(kib, each, series) for kib in sizes for each in counts]
    with work_directory(args.directory) as place:
        variants = {
            case.name: partial(child, "benchmarks.store.store_seal:seal", place=place, case=asdict(case))
            for case in cases
        }
        measured = interleave(variants, args.rounds)
    rows = [{**asdict(case), **medians(measured[case.name])} for case in cases]
    fields = ("append_us", "append_wall_us", "seal_s", "seal_cpu_s", "close_s")
    table(
        ["", "append CPU us", "wall us", "seal s", "seal CPU s", "close s"],
        [[row["name"], *(row[field] for field in fields)] for row in rows],
    )
    bound = MUST_S * series / MUST_SERIES
    checks = [verdict(f"seal {row['name']}, s", row["seal_s"], bound, at_most=True) for row in rows]
    report({"rounds": args.rounds, "rows": rows, "checks": checks}, args.json)


if __name__ == "__main__":
    main()
