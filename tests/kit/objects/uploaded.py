"""Puts a sealed run into an object store as an upload does, without the upload's code."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from capd._version import __version__
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.rows import CATALOG_NAME, SeriesRow, read_series
from capd.store.catalog.sessions import read_sessions
from capd.store.disk.layout import node_directory, nodes_of
from capd.store.documents.zarr_json import run_attributes
from capd.store.format.codecs import crc32c
from capd.store.objects.address import Address, parse_address
from capd.store.objects.bucket import Bucket
from capd.store.segments.manifest import (
    MANIFEST_NAME,
    Manifest,
    Segment,
    encode_manifest,
    node_prefix,
    segment_name,
)
from capd.store.segments.record_table import SegmentWriter, iterations_of
from capd.store.segments.series_table import (
    DocumentObject,
    Part,
    SeriesEntry,
    ShardObject,
    quant_types_of,
    write_series_table,
)
from tests.kit.objects.service import Bucket as TestBucket
from tests.kit.store.writing import Writer, key

__all__ = ["filled", "prefix", "publish"]


@pytest.fixture
def prefix(bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> Address:
    """A prefix in a bucket of the test's own. The environment leads there."""
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    return parse_address(bucket.url("runs"))


def publish(
    run: Path, prefix: Address, *, generation: int = 1, nodes: Sequence[str] | None = None, splits: int = 1
) -> Address:
    """Upload a sealed run below a prefix, and return its address.

    Args:
        run: The run.
        prefix: The address below which it comes.
        generation: The number of the manifests.
        nodes: The nodes whose manifests are written; all by default. The files of all are.
        splits: The number of record segments of each node.
    """
    bucket = Bucket(prefix / run.name)
    sizes: dict[str, tuple[int, int]] = {}
    files = [path for path in run.rglob("*") if path.is_file() and ".capd" not in path.relative_to(run).parts]
    for path in sorted(files, key=lambda one: one.name == "zarr.json"):
        payload = path.read_bytes()
        name = path.relative_to(run).as_posix()
        sizes[name] = (len(payload), crc32c(payload))
        bucket.put_file(name, path, *sizes[name])
    for node in nodes_of(run) if nodes is None else nodes:
        _publish_node(run, node, bucket, sizes, generation, splits)
    return bucket.address


def _publish_node(
    run: Path, node: str, bucket: Bucket, sizes: dict[str, tuple[int, int]], generation: int, splits: int
) -> None:
    with contextlib.closing(connect_read_only(node_directory(run, node) / CATALOG_NAME)) as database:
        rows, sessions = read_series(database), read_sessions(database)
        entries = {row.id: SeriesEntry(row, [], *_objects(row, sizes)) for row in rows}
        segments, footers = [], {}
        for number in range(splits):
            segment, footer = _record_segment(
                database, rows, entries, bucket, node, generation + number, number, splits
            )
            if segment.rows:
                segments.append(segment)
                footers[generation + number] = footer
    payload = write_series_table(list(entries.values()), footers)
    name = segment_name("series", generation)
    bucket.put(f"{node_prefix(node)}/{name}", payload)
    first, last = iterations_of(footers.values()) or (None, None)
    objects = [one for entry in entries.values() for one in (*entry.shards, *entry.documents)]
    manifest = Manifest(
        capd=__version__,
        run_id=run.stem,
        node=node,
        origin="0" * 32,
        generation=generation,
        written_ns=1_700_000_000_000_000_000 + generation,
        is_complete=True,
        attributes=run_attributes(run),
        series=Segment(name, len(payload), crc32c(payload), len(entries)),
        records=segments,
        sessions=sessions,
        raw_bytes=sum(row.raw_bytes for row in rows),
        stored_bytes=sum(row.stored_bytes for row in rows),
        first_iteration=first,
        last_iteration=last,
        quant_types=quant_types_of(list(entries.values())),
        objects=len(objects),
        object_bytes=sum(one.nbytes for one in objects),
    )
    bucket.put(f"{node_prefix(node)}/{MANIFEST_NAME}", encode_manifest(manifest))


def _objects(
    row: SeriesRow, sizes: dict[str, tuple[int, int]]
) -> tuple[list[ShardObject], list[DocumentObject]]:
    inside = {
        name.removeprefix(f"{row.header.path}/"): size
        for name, size in sizes.items()
        if name.startswith(f"{row.header.path}/")
    }
    shards = {int(name.split("/")[2]): size for name, size in inside.items() if name.startswith("data/c/")}
    documents = [
        DocumentObject(n, *size) for n, size in sorted(inside.items()) if not n.startswith("data/c/")
    ]
    return [ShardObject(number, *size) for number, size in sorted(shards.items())], documents


def _record_segment(
    database: sqlite3.Connection,
    rows: Sequence[SeriesRow],
    entries: dict[int, SeriesEntry],
    bucket: Bucket,
    node: str,
    number: int,
    at: int,
    splits: int,
) -> tuple[Segment, bytes]:
    """Write the `at`-th share of the records of each series."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "records.parquet"
        with SegmentWriter(file) as writer:
            for row in rows:
                first, last = row.records * at // splits, row.records * (at + 1) // splits
                for record, stored, body in database.execute(
                    "SELECT record, stored_nbytes, body FROM records WHERE series=? AND record>=? AND record<? "
                    "ORDER BY record",
                    (row.id, first, last),
                ):
                    writer.add(row.id, row.header.path, record, stored, body)
            written = writer.finish()
        payload = file.read_bytes()
        for row in rows:
            first, last = row.records * at // splits, row.records * (at + 1) // splits
            if last > first:
                entries[row.id].parts.append(Part(number, written.starts[row.id], first, last - first))
        name = segment_name("records", number)
        if written.rows:
            bucket.put_file(f"{node_prefix(node)}/{name}", file, len(payload), crc32c(payload))
        return Segment(name, len(payload), crc32c(payload), written.rows), written.footer


def filled(root: Path, *, run_id: str = "run", node: str = "n0", seed: int = 0, count: int = 9) -> Path:
    """A sealed run with large, small and empty records, statistics alone, and a second dtype."""
    writer, values = Writer(root, run_id=run_id, node=node), np.random.default_rng(seed)
    for iteration in range(count):
        for name, shape in (("large", (700, 900)), ("small", (3, 5)), ("none", (0, 4)), ("number", ())):
            bits = values.standard_normal(shape).astype("f4")
            writer.put(key(name, module=node), "float32", bits, iteration=iteration)
        writer.put(
            key("bf", module=node),
            "bfloat16",
            values.integers(0, 65536, (40, 30)).astype("u2"),
            iteration=iteration,
        )
        writer.put_statistics(
            key("stats", module=node),
            "float32",
            values.standard_normal((8, 8)).astype("f4"),
            iteration=iteration,
        )
    writer.close()
    return writer.run
