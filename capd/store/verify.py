"""Checks a run: every frame and checksum, every index, and that metadata, catalog and files agree. Changes nothing.

Works beside a live daemon, on the prefix that it has committed: what was said (catalog totals, logs, published
shapes) is read before the files that must hold it. A series in which damage shows is looked at again a moment
later, and only what shows again is reported. A torn tail in the spool is no damage.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from capd.errors import DamagedRecord, NotAStore, StoreError
from capd.store.catalog_check import Sums, series_now
from capd.store.catalog_read import SeriesRow
from capd.store.damage import Damage, Kind, Report
from capd.store.described import described
from capd.store.documents import read_group, run_attributes
from capd.store.dtypes import stored_shape
from capd.store.frames import FORMAT_VERSION, SeriesHeader
from capd.store.published import Published, read_array, read_published
from capd.store.scan import scan_shard
from capd.store.survey import shard_files
from capd.store.verify_metadata import array_problems, group_problems
from capd.store.verify_node import NodePromise, look_at_node
from capd.store.verify_shard import SeriesPromise, ShardResult, check_shard
from capd.store.verify_tree import foreign_files, group_documents, group_problem

__all__ = ["run_identity", "verify_run"]

_SECOND_LOOK_S = 0.3
_DAMAGED = (sqlite3.DatabaseError, ValueError, TypeError, LookupError, RecursionError)


def verify_run(
    run: Path, *, progress: Callable[[int], None] | None = None, threads: int | None = None
) -> Report:
    """Check everything of a run; progress is called with the bytes read so far.

    Raises NotAStore for what is no run, or of a newer format; OSError only for directories that cannot be listed.
    """
    report = Report(run)
    ids = frozenset({run_identity(run, report), run.stem})  # they differ once somebody renamed the run
    threads = threads or min(8, len(os.sched_getaffinity(0)))
    nodes = [look_at_node(run, directory, ids) for directory in sorted((run / ".capd").glob("node=*"))]
    if any(node.damaged for node in nodes):
        time.sleep(_SECOND_LOOK_S)
        nodes = [look_at_node(run, node.directory, ids) for node in nodes]
    for node in nodes:
        report.add(0, node.nbytes, node.damaged, node.notes)
    report.add(0, 0, group_documents(run), ())
    with ThreadPoolExecutor(threads, thread_name_prefix="capd-verify") as pool:
        waiting: deque[Future[ShardResult]] = deque()
        for path in _series_paths(run, nodes):
            report.series += 1
            for check in _checks_of(run, ids, path, nodes):
                waiting.append(pool.submit(_twice, check))
                while len(waiting) > 4 * threads:
                    _collect(waiting, report, progress)
        while waiting:
            _collect(waiting, report, progress)
    report.notes += [f"{path}: belongs to nothing in the run" for path in foreign_files(run)]
    report.damaged.sort(key=lambda d: (d.series, d.records[:1], d.file, d.offset or 0))
    return report


def run_identity(run: Path, report: Report | None = None) -> str:
    """The run id of a run directory; with a report, a damaged zarr.json is noted there instead of raised.

    Raises NotAStore for what is no run.
    """
    if not run.is_dir():
        raise NotAStore(
            f"{run} is {'a file' if run.exists() else 'missing'}; name a run or a directory of runs"
        )
    try:
        attributes = run_attributes(run)
        if "run_id" not in attributes:
            raise NotAStore(f"{run / 'zarr.json'} does not name the run")
        if report is not None and (problem := group_problem(run)):
            raise NotAStore(f"{run / 'zarr.json'} {problem}")
        return str(attributes["run_id"])
    except NotAStore as error:
        if report is None or not _is_ours(run):
            raise
        report.damaged.append(Damage("run", "", (), "zarr.json", None, str(error)))
        return run.stem


def _is_ours(run: Path) -> bool:
    """Whether the run's own zarr.json is wrong, but everything else says that it is a run of this format."""
    try:
        document = read_group(run) or {}
        newer = document["attributes"]["capd"]["format"] > FORMAT_VERSION
    except (NotAStore, LookupError, TypeError):
        newer = False
    return not newer and any((run / ".capd").glob("node=*"))


def _collect(
    waiting: deque[Future[ShardResult]], report: Report, progress: Callable[[int], None] | None
) -> None:
    found = waiting.popleft().result()
    report.add(found.records, found.nbytes, found.damaged, found.notes)
    if progress is not None:
        progress(report.nbytes)


def _twice(check: Callable[[], ShardResult]) -> ShardResult:
    found = check()
    if found.damaged:
        time.sleep(_SECOND_LOOK_S)
        found = check()
    return found


def _series_paths(run: Path, nodes: list[NodePromise]) -> list[str]:
    on_disk = {
        str(path.parent.parent.relative_to(run)) for path in run.glob("*/rank*/layer*/*/*/data/zarr.json")
    }
    on_disk |= {str(path.parent.parent.relative_to(run)) for path in run.glob("*/rank*/layer*/*/*/data/c")}
    told = {path for node in nodes for path in (*node.rows, *node.logged, *node.unsealed)}
    return sorted(on_disk | told)


def _checks_of(
    run: Path, ids: frozenset[str], path: str, nodes: list[NodePromise]
) -> Iterator[Callable[[], ShardResult]]:
    """One check for the series' metadata, and one for each of its shards."""
    promise, found = _promise_of(run, ids, path, nodes)
    yield lambda: found
    if promise is None:
        return
    for number in promise.shards():
        yield lambda number=number: _shard(promise, number)  # type: ignore[misc]


def _shard(promise: SeriesPromise, number: int) -> ShardResult:
    try:
        return check_shard(promise, number)
    except (OSError, StoreError, *_DAMAGED) as error:
        what = f"shard {number} cannot be checked: {error}"
        kind = "shard" if isinstance(error, OSError) else "catalog"
        damage = Damage(kind, promise.header.path, (), promise.header.path, None, what, promise.node)  # type: ignore[arg-type]
        return ShardResult(damaged=[damage])


def _promise_of(
    run: Path, ids: frozenset[str], path: str, nodes: list[NodePromise]
) -> tuple[SeriesPromise | None, ShardResult]:
    """What is said about a series, and where its metadata is wrong."""
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
            damage("zarr.json", "nothing says what the series is, or which node wrote it")
        return None, found
    if document is not None:
        for problem in array_problems(document, header):
            damage("data/zarr.json", problem)
    if published is not None:
        for problem in group_problems(published.document, header, node.name):
            damage("zarr.json", problem)
        if published.count < shape[0]:
            damage("zarr.json", f"moments of {published.count} records, but the array has {shape[0]}")
    known = node.rows.get(path)
    if known is not None and path in node.headers and node.headers[path] != header:
        damage("data", "the catalog describes the series differently than the spool", "catalog")
    for problem in _catalog_problems(node, path, shape, has_shards=bool(files)):
        damage("data", problem, "catalog")
    sums = Sums() if known is None else node.sums.get(known.id, Sums())
    logged = node.logged.get(path, {})
    said = max(shape[0], sums.last + 1, max(logged, default=-1) + 1, node.unsealed.get(path, 0))
    held = sums.records + len(logged) + (0 if published is None else published.count)
    held += header.geometry.shard_records * (len(files) + (path in node.unsealed))
    if shape[0] > held:
        damage("data/zarr.json", f"the array has {shape[0]} records, all files together at most {held}")
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
    """How the catalog contradicts the published shape of a series, looked at before and after that was read."""
    if node.catalog is None:
        return
    before, now = node.rows.get(path), _row_now(node.catalog, path)
    if before is None:
        if has_shards and shape[0] and now is None:
            yield "the series is not in the catalog"
        return
    if not before.sealing and before.sealed > shape[0]:
        yield f"the catalog has {before.sealed} sealed records, the array {shape[0]}"
    if now is None:
        return
    if not now.sealing and now.sealed < shape[0]:
        yield f"the catalog has {now.sealed} sealed records, the array {shape[0]}"
    largest = stored_shape(now.header.dtype, now.max_shape)
    if shape[0] and now.records and any(n > held for n, held in zip(shape[1:], largest, strict=False)):
        yield f"the array's shape is {list(shape)}, the largest record of the catalog {list(largest)}"


def _row_now(catalog: Path, path: str) -> SeriesRow | None:
    """The row of a series as it is now: a large run takes minutes to check."""
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
