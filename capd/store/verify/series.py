"""The promise of a series: its content in catalog, documents and spool, read before its shards are checked."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from capd.errors import DamagedRecord, StoreError
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.rows import SeriesRow, read_series
from capd.store.catalog.sums import RecordSums
from capd.store.format.dtypes import stored_shape
from capd.store.format.frames import RecordRow, SeriesHeader
from capd.store.scan.described import array_problems, described, group_problems
from capd.store.scan.published import Published, read_array, read_published
from capd.store.scan.scan import scan_shard
from capd.store.scan.survey import shard_files
from capd.store.verify.damage import Kind, Report
from capd.store.verify.node import NodePromise

__all__ = ["SeriesPromise", "promise_of"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SeriesPromise:
    """The promised content of a series, read before its shards.

    Attributes:
        run: The directory of the run.
        run_ids: The run ids that a HEADER may name.
        node: The node that wrote the series.
        header: The header of the series.
        catalog: The node's catalog and the series' id in it, None without a usable catalog.
        known: The number of records that the catalog counted.
        count: The minimum number of records, but no more than all files can hold.
        published: The published columns, None if the metadata is damaged.
        shape: The shape that plain Zarr readers see.
        logged: The rows of the records in small logs, by number.
        files: The sealed shards, by number.
    """

    run: Path
    run_ids: frozenset[str]
    node: str
    header: SeriesHeader
    catalog: tuple[Path, int] | None
    known: int
    count: int
    published: Published | None
    shape: tuple[int, ...]
    logged: Mapping[int, RecordRow]
    files: Mapping[int, Path]

    @property
    def shape0(self) -> int:
        """The number of records that plain Zarr readers see."""
        return self.shape[0]

    def shards(self) -> list[int]:
        """Return the numbers of all shards that exist or should exist."""
        per_shard = self.header.geometry.shard_records
        logged = {number // per_shard for number in self.logged}
        return sorted({*range(-(-self.count // per_shard)), *self.files, *logged})

    @property
    def spool(self) -> Path:
        """The directory of the node's `.partial` files."""
        return self.run / ".capd" / f"node={self.node}" / "spool"


def promise_of(
    run: Path, ids: frozenset[str], path: str, nodes: list[NodePromise]
) -> tuple[SeriesPromise | None, Report]:
    """Return the promise of a series (None if its header is unknown), and the damage in its metadata."""
    found = Report(run)
    node = next((node for node in nodes if path in node.rows), None)

    def damage(file: str, what: str, kind: Kind = "metadata") -> None:
        found.find(kind, run / path / file, what, series=path, node="" if node is None else node.name)

    def read(reader: Callable[[Path], T], file: str) -> T | None:
        try:
            return reader(run / path)
        except DamagedRecord as error:
            damage(file, str(error))
            return None

    document = read(read_array, "data/zarr.json")
    shape = (0,) if document is None else tuple(document["shape"])
    published = read(read_published, "zarr.json")
    files = shard_files(run / path)
    if node is None:
        node = next((n for n in nodes if path in n.headers or (published and n.name == published.node)), None)
    header = _header(run, node, path, files)
    if node is None or header is None:
        if files or shape[0]:
            damage("zarr.json", "no file describes the series, or names the node that wrote it")
        return None, found
    if document is not None:
        for problem in array_problems(document, header):
            damage("data/zarr.json", problem)
    if published is not None:
        for problem in group_problems(published.document, header, node.name):
            damage("zarr.json", problem)
        if published.count < shape[0]:
            damage(
                "zarr.json",
                f"it has moments of {published.count} records, but the array has {shape[0]} records",
            )
    known = node.rows.get(path)
    if known is not None and path in node.headers and node.headers[path] != header:
        damage("data", "the catalog describes the series differently than the spool", "catalog")
    if document is not None:
        for problem in _catalog_problems(node, path, shape, has_shards=bool(files)):
            damage("data", problem, "catalog")
    sums = RecordSums() if known is None else node.sums.get(known.id, RecordSums())
    logged = node.logged.get(path, {})
    said = max(shape[0], sums.last + 1, max(logged, default=-1) + 1, node.unsealed.get(path, 0))
    held = sums.records + len(logged) + (0 if published is None else published.count)
    held += header.geometry.shard_records * (len(files) + (path in node.unsealed))
    if shape[0] > held:
        damage(
            "data/zarr.json", f"the array has {shape[0]} records, but all files together have at most {held}"
        )
    promise = SeriesPromise(
        run, ids, node.name, header,
        None if node.catalog is None or known is None else (node.catalog, known.id),
        sums.last + 1,
        min(said, held), published, shape, logged, files,
    )  # fmt: skip
    return promise, found


def _catalog_problems(
    node: NodePromise, path: str, shape: tuple[int, ...], *, has_shards: bool
) -> Iterator[str]:
    """Yield contradictions between the catalog, before and after the shape was read, and a series' published shape."""
    if node.catalog is None:
        return
    before = node.rows.get(path)
    if before is None:
        if has_shards and shape[0] and _row_now(node.catalog, path) is None:
            yield "the series is not in the catalog"
        return
    if not before.sealing and before.sealed > shape[0]:
        yield f"the catalog has {before.sealed} sealed records, the array {shape[0]}"
    if (before.sealing or before.sealed >= shape[0]) and _holds(before, shape):
        return
    now = _row_now(node.catalog, path)
    if now is not None and not now.sealing and now.sealed < shape[0]:
        yield f"the catalog has {now.sealed} sealed records, the array {shape[0]}"
    if now is not None and not _holds(now, shape):
        yield f"the array's shape is {list(shape)}, the largest record of the catalog {list(now.max_shape)}"


def _holds(row: SeriesRow, shape: tuple[int, ...]) -> bool:
    """Return whether the catalog has records as large as the published shape, if any are published."""
    largest = stored_shape(row.header.dtype, row.max_shape)
    return not shape[0] or all(n <= held for n, held in zip(shape[1:], largest, strict=False))


def _row_now(catalog: Path, path: str) -> SeriesRow | None:
    """Return the current row of a series. The first one may be old, because checking a large run takes minutes."""
    with (
        contextlib.suppress(StoreError, sqlite3.DatabaseError),
        contextlib.closing(connect_read_only(catalog)) as database,
    ):
        return next(iter(read_series(database, path)), None)
    return None


def _header(run: Path, node: NodePromise | None, path: str, files: dict[int, Path]) -> SeriesHeader | None:
    if node is not None and path in node.rows:
        return node.rows[path].header
    for file in files.values():
        try:
            scanned = scan_shard(file)
        except (OSError, msgspec.MsgspecError):
            continue
        if scanned is not None and scanned.header.path == path:
            return scanned.header
    if node is None or path in node.headers:
        return None if node is None else node.headers[path]
    documents = described(run, path)
    return None if documents is None else documents[0]
