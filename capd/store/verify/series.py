"""The promise of a series: its content in catalog, documents and spool, read before its shards are checked."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from capd.errors import DamagedRecord, StoreError
from capd.store.catalog.rows import SeriesRow
from capd.store.catalog.sums import RecordSums, series_now
from capd.store.format.dtypes import stored_shape
from capd.store.format.frames import SeriesHeader
from capd.store.scan.described import array_problems, described, group_problems
from capd.store.scan.published import Published, read_array, read_published
from capd.store.scan.scan import scan_shard
from capd.store.scan.survey import shard_files
from capd.store.verify.damage import Damage, Kind
from capd.store.verify.node import NodePromise
from capd.store.verify.shard import SeriesPromise, ShardResult

__all__ = ["promise_of"]


def promise_of(
    run: Path, ids: frozenset[str], path: str, nodes: list[NodePromise]
) -> tuple[SeriesPromise | None, ShardResult]:
    """Return the promise of a series (None if its header is unknown), and the damage in its metadata."""
    found = ShardResult()
    node = next((node for node in nodes if path in node.rows), None)

    def damage(file: str, what: str, kind: Kind = "metadata") -> None:
        owner = "" if node is None else node.name
        found.damaged.append(Damage(kind, path, (), f"{path}/{file}", None, what, owner))

    document = _array(run / path, damage)
    shape = (0,) if document is None else tuple(document["shape"])
    published = _published(run / path, damage)
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
    try:
        return series_now(catalog, path)
    except (StoreError, sqlite3.DatabaseError):
        return None


def _array(series: Path, damage: Callable[[str, str], None]) -> dict[str, Any] | None:
    try:
        return read_array(series)
    except DamagedRecord as error:
        damage("data/zarr.json", str(error))
        return None


def _published(series: Path, damage: Callable[[str, str], None]) -> Published | None:
    try:
        return read_published(series)
    except DamagedRecord as error:
        damage("zarr.json", str(error))
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
