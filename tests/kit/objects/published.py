"""What a reader of an object store may trust: everything that a manifest names is there, whole, and as in the run."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import tensorstore
import zarr
from zarr.storage import ObjectStore

from capd.store.segments.manifest import Manifest, decode_manifest
from capd.store.segments.record_table import RecordSegment
from capd.store.segments.series_table import SeriesEntry, read_series_table
from tests.kit.objects.service import Bucket

__all__ = [
    "assert_published",
    "assert_same_files",
    "assert_zarr_reads_it",
    "bodies_in",
    "manifest_of",
    "read_object",
    "series_in",
]


def read_object(bucket: Bucket, key: str) -> bytes:
    """The bytes of an object."""
    return bytes(bucket.store().get(key).bytes())


def manifest_of(bucket: Bucket, run: str, node: str = "n0") -> Manifest | None:
    """The manifest of a node's part of a run, such as "prefix/run.zarr"; None if there is none."""
    try:
        payload = read_object(bucket, f"{run}/.capd/node={node}/manifest.json")
    except FileNotFoundError:
        return None
    return decode_manifest(payload, run)


def series_in(bucket: Bucket, run: str, node: str = "n0") -> tuple[list[SeriesEntry], dict[int, bytes]]:
    """The series that a manifest names, and the footers of its record segments."""
    manifest = manifest_of(bucket, run, node)
    assert manifest is not None
    return _series_of(bucket, run, node, manifest)


def _series_of(
    bucket: Bucket, run: str, node: str, manifest: Manifest
) -> tuple[list[SeriesEntry], dict[int, bytes]]:
    payload = read_object(bucket, f"{run}/.capd/node={node}/{manifest.series.name}")
    assert (len(payload), google_crc32c.value(payload)) == (manifest.series.nbytes, manifest.series.crc32c)
    return read_series_table(payload, run)


def bodies_in(bucket: Bucket, run: str, node: str = "n0") -> dict[str, list[bytes]]:
    """The rows of all records that a manifest names, by series."""
    manifest = manifest_of(bucket, run, node)
    assert manifest is not None
    # Of this manifest: the next one may be there by now.
    entries, footers = _series_of(bucket, run, node, manifest)
    segments: dict[int, RecordSegment] = {}
    for one in manifest.records:
        payload = read_object(bucket, f"{run}/.capd/node={node}/{one.name}")
        assert (len(payload), google_crc32c.value(payload)) == (one.nbytes, one.crc32c), one
        number = int(one.name.split("-")[1].split(".")[0])
        segments[number] = RecordSegment(
            one.name, footers[number], one.nbytes, lambda start, end, held=payload: held[start:end]
        )
        assert segments[number].rows == one.rows
    found: dict[str, list[bytes]] = {}
    for entry in entries:
        rows = [
            row
            for part in entry.parts
            for row in segments[part.segment].read(part.row, part.row + part.records)
        ]
        assert [row.record for row in rows] == list(range(entry.row.records))
        assert {row.series for row in rows} <= {entry.row.id}
        found[entry.row.header.path] = [row.body for row in rows]
    return found


def assert_published(bucket: Bucket, run: str, local: Path, node: str = "n0") -> Manifest | None:
    """All that the manifest names is there and correct: a part of the local run, whose records never change."""
    manifest = manifest_of(bucket, run, node)
    if manifest is None:
        return None
    entries, _ = series_in(bucket, run, node)
    store = bucket.store()
    for entry in entries:
        geometry, path = entry.row.header.geometry, f"{run}/{entry.row.header.path}"
        held = set()
        for shard in entry.shards:
            key = "/".join([path, "data", "c", str(shard.shard), *["0"] * len(geometry.extents)])
            payload = bytes(store.get(key).bytes())
            # A shard that was continued may be newer than the manifest. Then it holds what the older one held.
            is_newer = google_crc32c.value(payload) != shard.crc32c
            assert not is_newer or len(payload) >= shard.nbytes, key
            held |= set(
                range(shard.shard * geometry.shard_records, (shard.shard + 1) * geometry.shard_records)
            )
        assert set(range(entry.row.records)) <= held, entry
        for one in entry.documents:
            bytes(store.get(f"{path}/{one.name}").bytes())
    bodies = bodies_in(bucket, run, node)
    for path, rows in _local_bodies(local, node).items():
        there = bodies.get(path, [])
        assert there == rows[: len(there)], path
    return manifest


def _local_bodies(run: Path, node: str) -> dict[str, list[bytes]]:
    with closing(sqlite3.connect(run / ".capd" / f"node={node}" / "catalog.sqlite")) as database:
        found: dict[str, list[bytes]] = {}
        for path, body in database.execute(
            "SELECT path, body FROM records JOIN series ON series=id ORDER BY series, record"
        ):
            found.setdefault(path, []).append(body)
        return found


def assert_same_files(bucket: Bucket, run: str, local: Path) -> None:
    """The object store has every file that plain Zarr readers need, with the same bytes, and nothing else of them."""
    files = {
        str(path.relative_to(local)): path.read_bytes()
        for path in local.rglob("*")
        if path.is_file() and ".capd" not in path.relative_to(local).parts
    }
    keys = {key.removeprefix(f"{run}/") for key in bucket.keys(run)}
    assert {key for key in keys if not key.startswith(".capd/")} == files.keys()
    for name, payload in files.items():
        assert read_object(bucket, f"{run}/{name}") == payload, name


def assert_zarr_reads_it(bucket: Bucket, run: str, local: Path) -> int:
    """zarr-python and tensorstore read every array of the run from the bucket, bit for bit. Return their number."""
    count = 0
    for series in sorted(local.glob("*/rank*/layer*/*/*/data")):
        here = zarr.open_array(series, mode="r")[...]
        name = str(series.relative_to(local))
        group: Any = zarr.open_group(ObjectStore(bucket.store(run), read_only=True), mode="r")
        assert _bits(group[name][...]) == _bits(here)
        spec = {
            "driver": "zarr3",
            "kvstore": {
                "driver": "s3", "bucket": bucket.name, "path": f"{run}/{name}/", "endpoint": bucket.service.endpoint,
                "aws_region": "us-east-1", "aws_credentials": {"type": "environment"},
            },
        }  # fmt: skip
        assert _bits(tensorstore.open(spec).result().read().result()) == _bits(here)
        count += 1
    return count


def _bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()
