"""Checks a run: every frame, checksum and index, and that metadata, catalog and files agree. Changes nothing.

The check may run while a daemon works, on its committed prefix. The promises (catalog totals, logs, published shapes)
are read before the files that must keep them. A damaged shard is checked again a moment later, and only damage that
shows again is reported. A torn tail in the spool is not damage.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, TypeAlias, Union

from capd.errors import NotAStore, RemovedRun, StoreError
from capd.store.disk.layout import series_on_disk
from capd.store.documents.tombstone import check_present
from capd.store.documents.zarr_json import read_group, run_attributes, run_ids
from capd.store.format.frames import FORMAT_VERSION, SeriesHeader
from capd.store.verify.damage import Kind, Report
from capd.store.verify.node import NodePromise, look_at_node
from capd.store.verify.series import SeriesPromise, promise_of
from capd.store.verify.shard import check_shard
from capd.store.verify.tree import foreign_files, group_documents, group_problem

__all__ = [
    "Check", "CheckEach", "Present", "Shard", "all_ids", "check_shards_here", "check_twice", "run_identity",
    "verify_run",
]  # fmt: skip

Present: TypeAlias = Callable[[SeriesHeader, int], AbstractContextManager[None]]
"""Makes the file of a shard present for the time of a check."""

_SECOND_LOOK_S = 0.3


def _is_present(_header: SeriesHeader, _shard: int) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


_DAMAGED = (sqlite3.DatabaseError, ValueError, TypeError, LookupError, RecursionError)


class Shard(NamedTuple):
    """A shard to check: the promise of its series, and its number."""

    promise: SeriesPromise
    number: int

    @property
    def path(self) -> str:
        """The path of the series."""
        return self.promise.header.path

    @property
    def nbytes(self) -> int:
        """The size of its file, 0 without one."""
        try:
            return self.promise.files[self.number].stat().st_size
        except (KeyError, OSError):
            return 0


Check = Union[Shard, Report]
"""A shard, or what was found in the metadata of a series."""
CheckEach = Callable[[Iterable[Check]], Iterable[Report]]


def verify_run(
    run: Path,
    *,
    progress: Callable[[int], None] | None = None,
    threads: int | None = None,
    check_each: CheckEach | None = None,
) -> Report:
    """Check everything in a run.

    Args:
        run: The directory of the run.
        progress: A function that is called with the bytes read so far.
        threads: The number of threads. None: one per CPU core, at most 8.
        check_each: Checks shards and yields what it found in each, in order. None: `check_shards_here`.

    Raises:
        NotAStore: The directory is not a run, or its format is newer.
        OSError: A directory cannot be listed.
    """
    report = Report(run)
    # The two differ if somebody renamed the run.
    ids = all_ids(run, run_identity(run, report))
    nodes = [look_at_node(run, directory, ids) for directory in sorted((run / ".capd").glob("node=*"))]
    if any(node.report.damaged for node in nodes):
        time.sleep(_SECOND_LOOK_S)
        nodes = [look_at_node(run, node.directory, ids) for node in nodes]
    for node in nodes:
        report.add(node.report)
    for group, problem in group_documents(run):
        report.find("metadata", group, problem)
    for found in (check_each or check_shards_here(threads))(_checks(run, ids, nodes, report)):
        report.add(found)
        if progress is not None:
            progress(report.nbytes)
    report.notes += [f"{path}: is not part of the run" for path in foreign_files(run)]
    report.notes += [
        f"{shards:,} shards of {run.name} are at {to} and were not checked: `capd verify {to}` checks them"
        for to, shards in sorted(report.moved.items())
    ]
    report.damaged.sort(key=lambda d: (d.series, d.records[:1], d.file, d.offset or 0))
    return report


def run_identity(run: Path, report: Report | None = None) -> str:
    """Return the run id of a run directory.

    Args:
        run: The directory.
        report: The report that gets the damage of a damaged zarr.json. None: the damage is raised.

    Raises:
        RemovedRun: The run was removed.
        NotAStore: The directory is not a run.
    """
    if not run.is_dir():
        check_present(run)
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
    except RemovedRun:
        raise
    except NotAStore as error:
        if report is None or not _is_ours(run):
            raise
        report.find("run", run / "zarr.json", str(error))
        return run.stem


def all_ids(run: Path, run_id: str) -> frozenset[str]:
    """Return the run ids that the files of a run may name: its own, that of its directory, those of merged runs."""
    return frozenset({run_id, run.stem, *_merged_ids(run)})


def _merged_ids(run: Path) -> frozenset[str]:
    try:
        return run_ids(run)
    except NotAStore:
        return frozenset()


def _is_ours(run: Path) -> bool:
    """Return whether a directory with a damaged zarr.json is otherwise a run of this format."""
    try:
        document = read_group(run) or {}
        newer = document["attributes"]["capd"]["format"] > FORMAT_VERSION
    except (NotAStore, LookupError, TypeError):
        newer = False
    return not newer and any((run / ".capd").glob("node=*"))


def check_shards_here(threads: int | None, present: Present = _is_present) -> CheckEach:
    """Return what checks shards in threads of this process. None: one per CPU core, at most 8.

    `present` makes the file of a shard present while it is checked.
    """
    number = threads or min(8, len(os.sched_getaffinity(0)))

    def check_each(checks: Iterable[Check]) -> Iterator[Report]:
        with ThreadPoolExecutor(number, thread_name_prefix="capd-verify") as pool:
            waiting: deque[Future[Report]] = deque()
            for check in checks:
                waiting.append(pool.submit(check_twice, check, present))
                while len(waiting) > 4 * number:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    return check_each


def check_twice(check: Check, present: Present = _is_present) -> Report:
    """Check a shard. If it is damaged, check it again a moment later: a daemon may have been writing it."""
    if isinstance(check, Report):
        return check
    found = _shard(*check, present)
    if found.damaged:
        time.sleep(_SECOND_LOOK_S)
        found = _shard(*check, present)
    return found


def _series_paths(run: Path, nodes: list[NodePromise]) -> list[str]:
    on_disk = {
        path
        for path in series_on_disk(run)
        if any((run / path / "data" / name).exists() for name in ("zarr.json", "c"))
    }
    told = {path for node in nodes for path in (*node.rows, *node.logged, *node.unsealed)}
    return sorted(on_disk | told)


def _checks(run: Path, ids: frozenset[str], nodes: list[NodePromise], report: Report) -> Iterator[Check]:
    """Yield for each series what was found in its metadata, then its shards. Count the series in the report."""
    for path in _series_paths(run, nodes):
        report.series += 1
        promise, found = promise_of(run, ids, path, nodes)
        yield found
        if promise is not None:
            yield from (Shard(promise, number) for number in promise.shards())


def _shard(promise: SeriesPromise, number: int, present: Present) -> Report:
    try:
        with present(promise.header, number):
            return check_shard(promise, number)
    except (OSError, StoreError, *_DAMAGED) as error:
        report = Report(promise.run)
        kind: Kind = "shard" if isinstance(error, OSError) else "catalog"
        what, path = f"shard {number} cannot be checked: {error}", promise.header.path
        report.find(kind, promise.run / path, what, series=path, node=promise.node)
        return report
