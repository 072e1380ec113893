"""The time of `capd --help` and of `capd ls`, the latter on a run whose catalog holds a million records.

    python benchmarks/store/listing.py [--records N] [--series N] [--json]

The catalog is written directly, without tensors, because listing reads only the catalog. Results are medians of five
runs each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from capd.store.catalog.rows import CATALOG_NAME, SeriesRow
from capd.store.catalog.writer import Catalog, new_row
from capd.store.disk.layout import Layout, node_directory
from capd.store.documents import names
from capd.store.format.frames import RecordRow, SeriesHeader, StatsRow
from capd.store.format.geometry import plan_geometry
from capd_client.protocol.key import Key, Moment

REPEATS = 5
SHAPE = (64, 256)
BATCH_SERIES = 50


def main() -> None:
    """Build the run, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--series", type=int, default=2_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="capd-bench-") as directory:
        run = Path(directory) / "listing.zarr"
        build(run, options.series, options.records // options.series)
        commands = {
            "capd --help": ["--help"],
            "capd ls": ["ls", str(run)],
            "capd ls --by layer": ["ls", str(run), "--by", "layer"],
            "capd ls --json": ["ls", str(run), "--json"],
            "capd stats": ["stats", str(run)],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(REPEATS):
            for name, args in commands.items():
                seconds[name].append(time_capd(args))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    if options.json:
        print(json.dumps({"records": options.records, "series": options.series, "seconds": medians}))
        return
    print(f"{options.records:,} records in {options.series:,} series")
    for name, median in medians.items():
        print(f"{name:<20} {median:.2f} s")


def build(run: Path, series_count: int, records_each: int) -> None:
    """Write a run whose catalog lists `series_count` series of `records_each` records."""
    layout = Layout(run, run.stem, "bench")
    catalog = Catalog(node_directory(run, layout.node) / CATALOG_NAME)
    stats = StatsRow(64 * 256, 0, 0, 3, -1.5, 2.5, 2.5, 10.0, 99.0, [120, 16000, 121, 381])
    for first in range(0, series_count, BATCH_SERIES):
        rows, totals = [], []
        for number in range(first, min(first + BATCH_SERIES, series_count)):
            key = _key(number)
            header = SeriesHeader(
                names.series_path(key), key, "bfloat16", "zstd:1", plan_geometry(SHAPE, 2, 512 << 20)
            )
            identity = catalog.add_series(header)
            for record in range(records_each):
                row = RecordRow(
                    bytes(16),
                    number * records_each + record,
                    SHAPE,
                    32768,
                    Moment(iteration=record),
                    stats=stats,
                )
                rows.append(new_row(identity, record, row, 20000))
            raw, stored = records_each * 32768, records_each * 20000
            totals.append(SeriesRow(identity, header, records_each, records_each, False, SHAPE, raw, stored))
        catalog.write(rows, totals, {})
    catalog.close()


def _key(number: int) -> Key:
    layer, place = divmod(number, 20)
    return Key(
        quant_type="bf16", rank=layer % 8, tensor_name=("input", "output")[place % 2], layer=layer, phase="pre",
        layer_type="linear", component="linear", module=f"layers.{layer}.linear{place}", stack="layers",
    )  # fmt: skip


def time_capd(args: list[str]) -> float:
    """Return the wall seconds of one `capd` process."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "capd", *args],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
