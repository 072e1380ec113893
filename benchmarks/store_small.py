"""The cost of small records for the daemon: CPU microseconds per record through the real pipeline, and bytes written.

    python benchmarks/store_small.py [--rounds N] [--json FILE]

Records have 4, 16 and 64 KiB, round robin over 1 and 100 series. Records of 4 KiB also go to 5,000 series.

"append" is the time from the first record to the last commit, including the records that move into shards and the
catalog in this time. "seal" is the rest of the work until all shards are sealed and the store is closed. It is also
divided by the records.

"flood" submits as fast as it can. "one by one" waits for each commit, as a slow job does. "durable" syncs before
every acknowledgement, in groups if more records are waiting. Written bytes are those of all write calls, including
the catalog's.

The other engines are a raw log of framed records, np.save, zarr-python with one block per shard, and tensorstore
with one transaction per shard. None of them has statistics or a catalog. Only the raw log has records that survive a
kill before their shard is complete.

ext4 does not reuse an inode for some minutes after its file is deleted, and each new file searches past such inodes.
The rounds delete what they wrote, so 5,000 series become up to four times as slow as on a new file system. Two states
of the code are therefore compared on a memory file system (--directory /dev/shm), or on a new ext4 for each run.

must: 40 microseconds per 4 KiB record with statistics, all threads, append and seal together.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.store.store_arrays import Grid, create
from benchmarks.store.store_capd import CapdWriter, definition
from benchmarks.store.store_data import Bits, synthetic_records
from benchmarks.store.store_runner import (
    Meter,
    Row,
    child,
    file_nbytes,
    interleave,
    medians,
    options,
    report,
    table,
    verdict,
    work_directory,
)

COLUMNS = 1024
# Records are cut from these 4 MiB, so that neighbouring chunks differ.
BUFFER_ROWS = 2048
SHARD_NBYTES = 512 << 20
WARM_UP = 300
MUST_US = 40.0


@dataclass(frozen=True)
class Case:
    """One configuration of small records through capd."""

    kib: int
    series: int
    records: int
    statistics: bool = True
    durability: str = "buffered"
    one_by_one: bool = False

    @property
    def name(self) -> str:
        """The name in the table."""
        kind = "one by one" if self.one_by_one else "flood"
        extra = "" if self.durability == "buffered" else ", durable"
        return f"{self.kib} KiB, {self.series} series{'' if self.statistics else ', no statistics'}, {kind}{extra}"


def make_cases(*, quick: bool) -> list[Case]:
    """Return all cases, or two tiny ones."""
    if quick:
        return [Case(4, 10, 600), Case(4, 1, 20, durability="durable")]
    cases = [
        Case(kib, series, records, statistics)
        # Every series has only full chunks.
        for kib, records in ((4, 102_400), (16, 12_800), (64, 4_800))
        for series in (1, 100)
        for statistics in (True, False)
    ]
    return [
        *cases,
        Case(4, 5_000, 20_000),
        Case(4, 100, 4_000, one_by_one=True),
        Case(4, 100, 2_000, durability="durable"),
        Case(4, 100, 200, durability="durable", one_by_one=True),
    ]


class Source:
    """An endless source of records of bfloat16 bits, cut from a buffer."""

    def __init__(self, kib: int) -> None:
        self._data: Bits = synthetic_records(1, (BUFFER_ROWS, COLUMNS))[0]
        self.shape = (kib * 1024 // (2 * COLUMNS), COLUMNS)

    def record(self, number: int) -> Bits:
        """Return record `number`, contiguous."""
        rows = self.shape[0]
        first = number * rows % (len(self._data) - rows)
        return self._data[first : first + rows]

    def views(self) -> list[memoryview]:
        """Return the bytes of the records before they repeat, so that a measurement does not include their creation."""
        count = (len(self._data) - self.shape[0]) // self.shape[0]
        return [memoryview(self.record(number)).cast("B") for number in range(count)]


def capd(place: str, case: Row) -> Row:
    """Run one case. Returns the CPU of append and seal, by thread, and bytes."""
    this = Case(**case)
    source = Source(this.kib)
    settings = {"codec": "default", "statistics": this.statistics, "durability": this.durability}
    with work_directory(Path(place)) as root:
        warm = CapdWriter(root / "warm", threads=1, **settings)
        _put(warm, source, min(this.series, WARM_UP), WARM_UP, one_by_one=False)
        warm.close()
        writer = CapdWriter(root / "capd", threads=1, **settings)
        before = writer.thread_cpu_s()
        with Meter() as append:
            _put(writer, source, this.series, this.records, one_by_one=this.one_by_one)
        threads = {role: spent - before[role] for role, spent in writer.thread_cpu_s().items()}
        with Meter() as seal:
            writer.close()
        raw = this.records * this.kib * 1024
        return {
            "name": this.name, "records": this.records, "raw": raw, "stored": writer.stored_nbytes(),
            "catalog": file_nbytes(root / "capd", "**/catalog.sqlite*"),
            "written": append.written_nbytes + seal.written_nbytes,
            "append_us": append.cpu_s / this.records * 1e6, "append_wall_us": append.wall_s / this.records * 1e6,
            "seal_us": seal.cpu_s / this.records * 1e6, "seal_wall_s": seal.wall_s,
            **{f"{role} us": spent / this.records * 1e6 for role, spent in threads.items()},
        }  # fmt: skip


def _put(writer: CapdWriter, source: Source, series: int, records: int, *, one_by_one: bool) -> None:
    defines = [definition(number) for number in range(series)]
    views = source.views()
    for number in range(records):
        writer.put(defines[number % series], views[number % len(views)], source.shape, number // series)
        if one_by_one:
            writer.flush()
    writer.flush()


def raw_log(place: str, kib: int, records: int) -> Row:
    """Append each record with a frame and a checksum, and nothing else."""
    from capd.store.format.frames import FrameKind, frame

    source = Source(kib)
    with work_directory(Path(place)) as root:
        log = os.open(root / "log", os.O_WRONLY | os.O_CREAT, 0o600)
        with Meter() as meter:
            for number in range(records):
                raw = source.record(number).tobytes()
                os.writev(log, [frame(FrameKind.RECORD, raw, raw_nbytes=len(raw)), raw])
            os.close(log)
    return _other(meter, records)


def np_save(place: str, kib: int, records: int) -> Row:
    """Write one .npy file per record."""
    source = Source(kib)
    with work_directory(Path(place)) as root, Meter() as meter:
        for number in range(records):
            np.save(root / f"{number}.npy", source.record(number))
    return _other(meter, records)


def array(place: str, engine: str, kib: int, records: int) -> Row:
    """Write one block (zarr-python) or transaction (tensorstore) per shard, on capd's grid."""
    source = Source(kib)
    grid = Grid.of(records, source.shape, SHARD_NBYTES)
    data = np.stack([source.record(number) for number in range(records)])
    with work_directory(Path(place)) as root:
        create(engine, root / "warm", grid, 1).write_shard(0, data[: grid.chunks[0]])
        target = create(engine, root / "data", grid, 1)
        with Meter() as meter:
            for first in range(0, records, grid.shards[0]):
                target.write_shard(first, data[first : first + grid.shards[0]])
    return _other(meter, records)


def _other(meter: Meter, records: int) -> Row:
    return {
        "records": records,
        "us": meter.cpu_s / records * 1e6,
        "wall_us": meter.wall_s / records * 1e6,
        "written": meter.written_nbytes,
    }


def measure(
    cases: list[Case], sizes: dict[int, int], place: Path, rounds: int
) -> tuple[list[Row], list[Row]]:
    """Return the rows of capd's cases, and of the other engines for each size (KiB → records)."""
    variants: dict[str, Callable[[], Row]] = {
        case.name: partial(child, "benchmarks.store_small:capd", place=place, case=asdict(case))
        for case in cases
    }
    for kib, records in sizes.items():
        for name in ("raw_log", "np_save"):
            call = partial(child, f"benchmarks.store_small:{name}", place=place, kib=kib, records=records)
            variants[f"{kib} KiB, {name}"] = call
        for engine in ("zarr-python", "tensorstore"):
            call = partial(
                child, "benchmarks.store_small:array", place=place, engine=engine, kib=kib, records=records
            )
            variants[f"{kib} KiB, {engine}"] = call
    rows = {name: medians(found) for name, found in interleave(variants, rounds).items()}
    ours = [{**asdict(case), **rows[case.name]} for case in cases]
    names = {case.name for case in cases}
    return ours, [{"name": name, **row} for name, row in rows.items() if name not in names]


def show(ours: list[Row], others: list[Row]) -> list[Row]:
    """Print both tables. Returns the verdicts."""
    roles = [name for name in ours[0] if name.endswith(" us")]
    cells = [
        [
            row["name"], row["append_us"], *(row[role] for role in roles), row["append_wall_us"], row["seal_us"],
            row["append_us"] + row["seal_us"], row["written"] / (row["stored"] + row["raw"]),
        ]
        for row in ours
    ]  # fmt: skip
    print("CPU microseconds per record; written bytes against stored bytes + raw bytes")
    table(["capd", "append", *roles, "append wall", "seal", "sum", "written/(stored+raw)"], cells)
    table(["others", "CPU us", "wall us"], [[row["name"], row["us"], row["wall_us"]] for row in others])
    return [
        verdict(row["name"], row["append_us"] + row["seal_us"], MUST_US, at_most=True)
        for row in ours
        if row["kib"] == 4 and row["statistics"] and row["durability"] == "buffered"
    ]


def main() -> None:
    parser = options(__doc__, rounds=3)
    args = parser.parse_args()
    sizes = {4: 40} if args.quick else {4: 4096, 16: 2048, 64: 1024}
    with work_directory(args.directory) as place:
        ours, others = measure(make_cases(quick=args.quick), sizes, place, args.rounds)
    checks = show(ours, others)
    report({"rounds": args.rounds, "capd": ours, "others": others, "checks": checks}, args.json)


if __name__ == "__main__":
    main()
