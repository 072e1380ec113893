"""Checks a run in an object store: that its objects are there, and everything that a local run is checked for.

The documents and a catalog from the segments make a run in a temporary directory, and this is checked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from capd.errors import NotAStore, ObjectStoreError
from capd.store.catalog.totals import held_by
from capd.store.objects.address import Address
from capd.store.objects.bucket import Head
from capd.store.remote.node import RemoteNode
from capd.store.remote.objects import NamedObject, named_objects
from capd.store.remote.run import RemoteRun
from capd.store.segments.manifest import MANIFEST_NAME, node_prefix
from capd.store.verify.damage import Damage, Report
from capd.store.verify.fetched import FetchedRun, damage_of
from capd.store.verify.run import CheckEach, check_shards_here, verify_run

__all__ = ["readable_nodes", "verify_remote"]

_THREADS = 8


def verify_remote(
    place: Address,
    *,
    listing: bool = False,
    progress: Callable[[int], None] | None = None,
    threads: int | None = None,
    checks_of: Callable[[Path], CheckEach] | None = None,
) -> Report:
    """Check everything of a run in an object store that its manifests name.

    Args:
        place: The address of the run.
        listing: Only compare the names and sizes of the objects, by one listing. No shard is read.
        progress: A function that is called with the bytes read so far.
        threads: The number of threads. None: one per CPU core, at most 8.
        checks_of: Returns what checks the shards elsewhere, for the directory that has the rest of the run.

    Raises:
        NotAStore: It is not a run, or a newer capd wrote it.
        ObjectStoreError: The store does not answer, or refuses.
    """
    run = RemoteRun(place)
    report = Report(place)
    nodes = list(readable_nodes(run, report))
    if not report.ok:
        return report
    report.damaged += _without_manifest(run)
    heads = {head.key: head for head in run.bucket.listing()}
    named = list(named_objects(nodes))
    report.damaged += _differences(named, heads)
    if listing:
        report.series = sum(len(node.entries) for node in nodes)
        held = held_by(entry.row for node in nodes for entry in node.entries.values())
        report.records, report.error_records = held.records, held.error_records
        return report
    # Missing objects are damage already; the check of their series names the records.
    there = [one for one in named if one.key in heads]
    files = FetchedRun(run, nodes)
    with contextlib.closing(files):
        files.fetch(there)
        without = files.write_catalogs()
        report.damaged += without
        if not without and "zarr.json" in heads:
            checks = (
                check_shards_here(_threads(threads), files.present)
                if checks_of is None
                else checks_of(files.path)
            )
            _check_files(files, report, progress, checks)
        report.damaged += files.damaged.values()
    report.notes += _leftovers(named, heads)
    report.damaged = list(dict.fromkeys(report.damaged))
    report.damaged.sort(key=lambda d: (d.series, d.records[:1], d.file, d.offset or 0))
    return report


def _threads(asked: int | None) -> int:
    return asked or min(_THREADS, len(os.sched_getaffinity(0)))


def _check_files(
    files: FetchedRun, report: Report, progress: Callable[[int], None] | None, checks: CheckEach
) -> None:
    """Check the files as a run on this machine, and add what is found."""
    try:
        checked = verify_run(files.path, progress=progress, check_each=checks)
    except NotAStore as error:
        what = str(error).replace(str(files.path), str(report.run))
        report.damaged.append(Damage("run", "", (), "zarr.json", None, what))
        return
    report.series, report.nbytes = checked.series, checked.nbytes
    report.records, report.error_records = checked.records, checked.error_records
    report.damaged += checked.damaged
    report.notes += checked.notes


def readable_nodes(run: RemoteRun, report: Report) -> Iterator[RemoteNode]:
    """Yield the nodes whose manifest and series segment are sound. The others are damage."""
    for name in run.names():
        try:
            node = run.node(name)
            _ = node.entries
            yield node
        except ObjectStoreError as error:
            if error.reason not in ("other", "missing"):
                raise
            file = f"{node_prefix(name)}/{MANIFEST_NAME}"
            report.damaged.append(Damage("catalog", "", (), file, None, str(error), name))


def _without_manifest(run: RemoteRun) -> Iterator[Damage]:
    for name in sorted(run.without_manifest):
        file = f"{node_prefix(name)}/{MANIFEST_NAME}"
        yield Damage("catalog", "", (), file, None, "the node has segments, but no manifest names them", name)


def _differences(named: list[NamedObject], heads: Mapping[str, Head]) -> Iterator[Damage]:
    for one in named:
        head = heads.get(one.key)
        if head is None:
            yield damage_of(one, "the manifest names it, but there is no such object")
        elif one.nbytes is not None and head.nbytes != one.nbytes:
            yield damage_of(one, f"it has {head.nbytes} bytes, and {one.nbytes} in the manifest")


def _leftovers(named: list[NamedObject], heads: Mapping[str, Head]) -> Iterator[str]:
    known = {one.key for one in named}
    for key in sorted(heads):
        # An earlier generation stays for its readers.
        if key not in known and not key.startswith(".capd/"):
            yield f"{key}: is not part of the run"
