"""The cost of writing large bfloat16 records: capd's pipeline, zarr-python, zarrs, tensorstore, the bare codec.

    python benchmarks/store_write.py [--corpus DIR] [--shard-mib N] [--rounds N] [--json FILE]

"stream": 8 MiB records are written into shards, from the first record to the last sealed shard. zarr-python and
zarrs get one block per shard, tensorstore one transaction per shard. capd gets records, as the daemon does, and
closes its store inside the measured time.

"append": one record is appended to a shard that is half full. The other engines rewrite the shard. capd is measured
once until the record is committed (readable through capd, safe from a kill). It is measured again with every record
sealed (readable by plain Zarr readers).

All engines have the same data, grid, codec and number of threads. The bare codec is the chain that each of them
runs, compressor and crc32c, over the same chunks. It writes nothing. It is measured in an ordinary process, and
again with the heap settings of capd's daemon (`capd.server.heap`), which also make it faster.

must: at least 0.80 of the bare codec's MB per CPU second, 1.1 times tensorstore's, twice zarr-python's; with
statistics 0.45 of the bare codec's; an append at least ten times faster than anyone's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.store.store_arrays import Grid, create, installed_engines
from benchmarks.store.store_capd import CapdWriter, definition
from benchmarks.store.store_data import Bits, save_records, synthetic_records
from benchmarks.store.store_runner import (
    MIB,
    Meter,
    Row,
    child,
    file_nbytes,
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
APPENDS = 4
# Appends are also measured on larger shards. With 128 MiB these have capd's own size.
APPEND_FACTOR = 4
MUST_APPEND = 10.0
MUST = (("bare codec", 0.80), ("tensorstore", 1.1), ("zarr-python", 2.0))


def _put(writer: CapdWriter, records: Bits, first: int = 0) -> None:
    define = definition(0)
    for number, record in enumerate(records, first):
        writer.put(define, memoryview(record).cast("B"), record.shape, number)


def stream_bare(data: str, threads: int, shard_nbytes: int, heap: bool) -> Row:
    """Run only the codec chain (compressor, crc32c), in memory, over the same chunks.

    `heap`: use the daemon's settings.
    """
    from capd.server.heap import settle_heap
    from capd.store.format.codec_choice import codec_name
    from capd.store.format.codecs import chain_for

    records: Bits = np.load(data)
    grid = Grid.of(len(records), records.shape[1:], shard_nbytes)
    chunks = records.reshape(-1, *grid.chunks[1:])
    encode = chain_for(codec_name("default", "bfloat16", b""), "bfloat16").encode
    encode(chunks[0])
    if heap:
        settle_heap()
    with ThreadPoolExecutor(threads) as pool, Meter() as meter:
        stored = sum(pool.map(lambda chunk: encode(chunk).nbytes, chunks))
    return meter.row(raw=records.nbytes, stored=stored)


def stream_capd(data: str, place: str, threads: int, shard_nbytes: int, statistics: bool) -> Row:
    """Run capd from the first record to the closed store.

    A small run before it imports and warms up everything that a daemon has ready.
    """
    records: Bits = np.load(data)
    settings: dict[str, Any] = {"codec": "default", "shard_nbytes": shard_nbytes, "statistics": statistics}
    with work_directory(Path(place)) as root:
        warm = CapdWriter(root / "warm", threads=threads, **settings)
        _put(warm, records[:2])
        warm.close()
        writer = CapdWriter(root / "capd", threads=threads, **settings)
        with Meter() as meter:
            _put(writer, records)
            writer.close()
        return meter.row(raw=records.nbytes, stored=writer.stored_nbytes())


def stream_array(engine: str, data: str, place: str, threads: int, shard_nbytes: int) -> Row:
    """Run another engine, shard by shard."""
    records: Bits = np.load(data)
    grid = Grid.of(len(records), records.shape[1:], shard_nbytes)
    with work_directory(Path(place)) as root:
        create(engine, root / "warm", Grid.of(1, grid.shape[1:], shard_nbytes), threads).write_shard(
            0, records[:1]
        )
        array = create(engine, root / "data", grid, threads)
        with Meter() as meter:
            for first in range(0, len(records), grid.shards[0]):
                array.write_shard(first, records[first : first + grid.shards[0]])
        return meter.row(raw=records.nbytes, stored=file_nbytes(root / "data", "c/**/*"))


def append_capd(place: str, shape: list[int], shard_nbytes: int, sealed: bool) -> Row:
    """Append to half a shard with capd: each record committed, or each record sealed."""
    grid = Grid.of(1, tuple(shape), shard_nbytes)
    half = grid.shards[0] // 2
    records = synthetic_records(min(half + APPENDS, grid.shards[0]), (shape[0], shape[1]))
    with work_directory(Path(place)) as root:
        writer = CapdWriter(root, threads=1, codec="default", shard_nbytes=shard_nbytes, statistics=False)
        finish = writer.seal if sealed else writer.flush
        _put(writer, records[:half])
        finish()
        rows = []
        for number in range(half, len(records)):
            with Meter() as meter:
                _put(writer, records[number : number + 1], number)
                finish()
            rows.append(meter.row(raw=records[0].nbytes))
        writer.close()
    return medians(rows)


def append_array(engine: str, place: str, shape: list[int], shard_nbytes: int) -> Row:
    """Append to half a shard with another engine: `array[i] = record`."""
    grid = Grid.of(1, tuple(shape), shard_nbytes)
    half = grid.shards[0] // 2
    records = synthetic_records(min(half + APPENDS, grid.shards[0]), (shape[0], shape[1]))
    with work_directory(Path(place)) as root:
        whole = Grid((grid.shards[0], *shape), grid.shards, grid.chunks)
        array = create(engine, root / "data", whole, 1)
        array.write(0, records[:half])
        rows = []
        for number in range(half, len(records)):
            with Meter() as meter:
                array.write(number, records[number : number + 1])
            rows.append(meter.row(raw=records[0].nbytes))
    return medians(rows)


def measure_stream(
    kind: str, data: Path, threads: int, place: Path, shard_nbytes: int, rounds: int, engines: Sequence[str]
) -> list[Row]:
    """Return one row per engine."""
    common = {"data": data, "threads": threads, "shard_nbytes": shard_nbytes}
    capd = partial(child, "benchmarks.store_write:stream_capd", **common, place=place)
    variants: dict[str, Callable[[], Row]] = {
        "bare codec": partial(child, "benchmarks.store_write:stream_bare", heap=False, **common),
        "bare codec, capd's heap": partial(child, "benchmarks.store_write:stream_bare", heap=True, **common),
        "capd": partial(capd, statistics=False),
        "capd + statistics": partial(capd, statistics=True),
    }
    for engine in engines:
        variants[engine] = partial(
            child, "benchmarks.store_write:stream_array", engine=engine, place=place, **common
        )
    results = []
    for engine, rows in interleave(variants, rounds).items():
        row = medians(rows)
        row["mb_per_cpu_s"], row["mb_per_s"] = (row["raw"] / 1e6 / row[t] for t in ("cpu_s", "wall_s"))
        results.append({"data": kind, "threads": threads, "engine": engine, **row})
    return results


def measure_append(
    place: Path, shape: tuple[int, int], shard_nbytes: int, rounds: int, engines: Sequence[str]
) -> list[Row]:
    """Return one row per engine, capd first."""
    common = {"place": place, "shape": shape, "shard_nbytes": shard_nbytes}
    variants: dict[str, Callable[[], Row]] = {
        "capd": partial(child, "benchmarks.store_write:append_capd", sealed=False, **common),
        "capd, each sealed": partial(child, "benchmarks.store_write:append_capd", sealed=True, **common),
    }
    for engine in engines:
        variants[engine] = partial(child, "benchmarks.store_write:append_array", engine=engine, **common)
    measured = interleave(variants, rounds)
    return [
        {"engine": engine, "shard_nbytes": shard_nbytes, **medians(rows)} for engine, rows in measured.items()
    ]


def show_stream(results: list[Row]) -> list[Row]:
    """Print the table. Returns the verdicts on the ratios' medians over data and threads."""
    efficiency = {(r["data"], r["threads"], r["engine"]): r["mb_per_cpu_s"] for r in results}
    cells: list[list[object]] = []
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in results:
        place = (row["data"], row["threads"])
        against = [row["mb_per_cpu_s"] / efficiency[(*place, other)] for other, _ in MUST]
        for (other, _), ratio in zip(MUST, against, strict=True):
            ratios.setdefault((row["engine"], other), []).append(ratio)
        cells.append(
            [
                f"{row['data']}, {row['threads']} thr, {row['engine']}", row["mb_per_cpu_s"], row["mb_per_s"],
                *against, row["raw"] / row["stored"], row["written_nbytes"] / row["stored"],
            ]
        )  # fmt: skip
    table(
        ["stream", "MB/CPU s", "MB/s", "x bare", "x tensorstore", "x zarr", "ratio", "written/stored"], cells
    )
    checks = [
        verdict(f"capd / {other}", statistics.median(ratios["capd", other]), bound) for other, bound in MUST
    ]
    with_statistics = statistics.median(ratios["capd + statistics", "bare codec"])
    return [*checks, verdict("capd with statistics / bare codec", with_statistics, 0.45)]


def show_append(results: list[Row]) -> list[Row]:
    """Print the table. Returns the verdict on the larger shards, which have the size that capd makes."""
    cells: list[list[object]] = []
    fastest: dict[int, float] = {}
    for row in results:
        mib = row["shard_nbytes"] // MIB
        ours = next(r for r in results if r["engine"] == "capd" and r["shard_nbytes"] == row["shard_nbytes"])
        wall, cpu = (row[field] / ours[field] for field in ("wall_s", "cpu_s"))
        if not row["engine"].startswith("capd"):
            fastest[mib] = min(wall, fastest.get(mib, wall))
        times = (row["wall_s"] * 1e3, row["cpu_s"] * 1e3)
        cells.append([f"{mib} MiB, {row['engine']}", *times, wall, cpu, row["written_nbytes"] / row["raw"]])
    table(["append to a shard", "ms", "CPU ms", "x capd", "x capd, CPU", "written/raw"], cells)
    mib, ratio = max(fastest.items())
    return [verdict(f"append, {mib} MiB shard: the fastest other / capd, wall", ratio, MUST_APPEND)]


def main() -> None:
    parser = options(__doc__, rounds=5, directory=memory_directory())
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="made there if need be")
    parser.add_argument("--shard-mib", type=int, default=128)
    parser.add_argument("--records", type=int, default=32, help="of 8 MiB, in the stream")
    args = parser.parse_args()
    shape, records, shard_nbytes = RECORD, args.records, args.shard_mib * MIB
    append_shards = [shard_nbytes, APPEND_FACTOR * shard_nbytes]
    cases = [(kind, threads) for kind in ("synthetic", "corpus") for threads in (1, 2)]
    if args.quick:
        shape, records, shard_nbytes, cases = QUICK_RECORD, 8, 2 * MIB, [("corpus", 2)]
        append_shards = [shard_nbytes]
    engines = installed_engines()
    with work_directory(args.directory) as place:
        data = save_records(place, records, shape, args.corpus, quick=args.quick)
        stream = []
        for kind, threads in cases:
            stream += measure_stream(kind, data[kind], threads, place, shard_nbytes, args.rounds, engines)
        append = []
        for nbytes in append_shards:
            append += measure_append(place, shape, nbytes, args.rounds, engines)
    checks = [*show_stream(stream), *show_append(append)]
    report({"rounds": args.rounds, "stream": stream, "append": append, "checks": checks}, args.json)


if __name__ == "__main__":
    main()
