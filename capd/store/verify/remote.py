"""Checks a run in an object store: that its objects are there, and everything that a local run is checked for.

The documents and a catalog from the segments make a run in a temporary directory. Each shard comes there for its check
alone.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from capd.errors import NotAStore, ObjectStoreError
from capd.store.disk.files import make_directory
from capd.store.disk.layout import node_directory
from capd.store.format.frames import SeriesHeader
from capd.store.objects.address import Address
from capd.store.objects.bucket import Head
from capd.store.remote.catalog_copy import write_catalog
from capd.store.remote.node import RemoteNode
from capd.store.remote.objects import NamedObject, download, named_objects, shard_object
from capd.store.remote.run import RemoteRun
from capd.store.segments.manifest import MANIFEST_NAME, node_prefix
from capd.store.verify.damage import Damage, Kind, Report
from capd.store.verify.run import verify_run

__all__ = ["verify_remote"]

_THREADS = 8
_DOWNLOADS = 16


def verify_remote(
    place: Address,
    *,
    listing: bool = False,
    progress: Callable[[int], None] | None = None,
    threads: int | None = None,
) -> Report:
    """Check everything of a run in an object store that its manifests name.

    Args:
        place: The address of the run.
        listing: Only compare the names and sizes of the objects, by one listing. No shard is read.
        progress: A function that is called with the bytes read so far.
        threads: The number of threads. None: one per CPU core, at most 8.

    Raises:
        NotAStore: It is not a run, or a newer capd wrote it.
        ObjectStoreError: The store does not answer, or refuses.
    """
    run = RemoteRun(place)
    report = Report(place)
    nodes = list(_nodes(run, report))
    if not report.ok:
        return report
    report.damaged += _without_manifest(run)
    heads = {head.key: head for head in run.bucket.listing()}
    named = list(named_objects(nodes))
    report.damaged += _differences(named, heads)
    if listing:
        report.series = sum(len(node.entries) for node in nodes)
        report.records = sum(entry.row.records for node in nodes for entry in node.entries.values())
        return report
    # Missing objects are damage already; the check of their series names the records.
    there = [one for one in named if one.key in heads]
    with tempfile.TemporaryDirectory(prefix="capd-verify-") as directory:
        files = _Files(run, nodes, Path(directory) / place.name)
        without = files.prepare(there)
        report.damaged += without
        if not without and "zarr.json" in heads:
            _check_files(files, report, progress, threads)
        report.damaged += files.damaged.values()
    report.notes += _leftovers(named, heads)
    report.damaged = list(dict.fromkeys(report.damaged))
    report.damaged.sort(key=lambda d: (d.series, d.records[:1], d.file, d.offset or 0))
    return report


def _check_files(
    files: _Files, report: Report, progress: Callable[[int], None] | None, threads: int | None
) -> None:
    """Check the files as a run on this machine, and add what is found."""
    threads = threads or min(_THREADS, len(os.sched_getaffinity(0)))
    try:
        checked = verify_run(files.run, progress=progress, threads=threads, present=files.present)
    except NotAStore as error:
        what = str(error).replace(str(files.run), str(report.run))
        report.damaged.append(Damage("run", "", (), "zarr.json", None, what))
        return
    report.series, report.records, report.nbytes = checked.series, checked.records, checked.nbytes
    report.damaged += checked.damaged
    report.notes += checked.notes


def _nodes(run: RemoteRun, report: Report) -> Iterator[RemoteNode]:
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
            yield _damage(one, "the manifest names it, but there is no such object")
        elif one.nbytes is not None and head.nbytes != one.nbytes:
            yield _damage(one, f"it has {head.nbytes} bytes, and {one.nbytes} in the manifest")


def _damage(one: NamedObject, what: str) -> Damage:
    kind: Kind = "shard" if one.shard is not None else "metadata" if one.series else "catalog"
    if not one.node:
        kind = "run" if one.key == "zarr.json" else "metadata"
    return Damage(kind, one.series, (), one.key, None, what, one.node)


def _leftovers(named: list[NamedObject], heads: Mapping[str, Head]) -> Iterator[str]:
    known = {one.key for one in named}
    for key in sorted(heads):
        # An earlier generation stays for its readers.
        if key not in known and not key.startswith(".capd/"):
            yield f"{key}: is not part of the run"


class _Files:
    """The files of a run in a temporary directory. run: its path. damaged: what differs from the manifest, by key."""

    def __init__(self, source: RemoteRun, nodes: list[RemoteNode], run: Path) -> None:
        self.run = run
        self.damaged: dict[str, Damage] = {}
        self._source, self._nodes = source, nodes
        self._lock = threading.Lock()

    def prepare(self, there: list[NamedObject]) -> list[Damage]:
        """Write documents and catalogs, and an empty file in place of each shard. Return what cannot be had."""
        for node in self._nodes:
            make_directory(node_directory(self.run, node.name) / "spool")
        with ThreadPoolExecutor(_DOWNLOADS, thread_name_prefix="capd-get") as pool:
            list(pool.map(self._fetch, [one for one in there if one.shard is None]))
        for one in there:
            if one.shard is not None:
                self._hide(self.run / one.key, one.nbytes or 0)
        found = []
        for node in self._nodes:
            try:
                write_catalog(node, node_directory(self.run, node.name))
            except ObjectStoreError as error:
                if error.reason not in ("other", "missing"):
                    raise
                file = f"{node_prefix(node.name)}/{node.manifest.series.name}"
                found.append(Damage("catalog", "", (), file, None, str(error), node.name))
        return found

    @contextlib.contextmanager
    def present(self, header: SeriesHeader, shard: int) -> Iterator[None]:
        """Have a shard in its file for the time of a check."""
        one = shard_object(self._nodes, header, shard)
        if one is None or not (self.run / one.key).exists():
            yield
            return
        self._fetch(one)
        try:
            yield
        finally:
            self._hide(self.run / one.key, one.nbytes or 0)

    def _fetch(self, one: NamedObject) -> None:
        try:
            differs = download(self._source.bucket, one, self.run)
        except FileNotFoundError:
            differs = "the manifest names it, but there is no such object"
        with self._lock:
            # A second look may find it sound.
            self.damaged.pop(one.key, None)
            if differs:
                self.damaged[one.key] = _damage(one, differs)
        if one.key.startswith(".capd/"):
            # The local run has a catalog instead.
            (self.run / one.key).unlink(missing_ok=True)

    def _hide(self, file: Path, nbytes: int) -> None:
        """Replace a file by one of the same size without blocks on the disk."""
        make_directory(file.parent)
        with open(file, "wb") as empty:
            empty.truncate(nbytes)
