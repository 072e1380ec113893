"""Copies a run from an object store into a new run on this machine, which is equal to the one that was uploaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import google_crc32c

from capd.copying.files import Progress
from capd.errors import ObjectStoreError
from capd.store.alerts.file import ALERTS_NAME
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import make_directory, sync_paths, unlink, write_file
from capd.store.disk.layout import node_directory
from capd.store.disk.power import mount_of
from capd.store.documents.json_document import document_in
from capd.store.keeps.file import write_keeps
from capd.store.objects.address import Address
from capd.store.remote.catalog_copy import write_catalog
from capd.store.remote.node import RemoteNode
from capd.store.remote.objects import NamedObject, download, named_objects
from capd.store.remote.run import RemoteRun

__all__ = ["bring_run", "files_at"]

_AT_ONCE = 8
# An upload may replace objects while they are copied.
_ROUNDS = 3
_PIECE_NBYTES = 4 << 20


def bring_run(source: Address, target: Path, progress: Progress) -> int:
    """Copy a run from an object store, durably. Files that are already there with the same bytes are kept.

    Args:
        source: The address of the run.
        target: The directory of the copy.
        progress: Called with the bytes of each file.

    Returns:
        The number of records.

    Raises:
        NotAStore: `source` is not a run.
        ObjectStoreError: An object is missing, is not as its manifest says, or cannot be read.
        OSError: A file cannot be written.
    """
    run = RemoteRun(source)
    nodes = run.nodes()
    make_directory(target)
    for number in range(_ROUNDS):
        wanted = _files_of(nodes)
        problem = _bring(run, wanted, target, progress)
        if not problem:
            break
        before, nodes = nodes, run.nodes()
        if number + 1 == _ROUNDS or [one.manifest for one in before] == [one.manifest for one in nodes]:
            raise ObjectStoreError(f"{problem}; `capd verify {source}` lists all damage")
    _remove_others(target, wanted)
    for node in nodes:
        directory = node_directory(target, node.name)
        make_directory(directory / "spool")
        # A killed command may have left a part of it.
        for path in directory.glob(f"{CATALOG_NAME}*"):
            unlink(path)
        write_catalog(node, directory, mount_of(target))
        if lines := node.alert_lines():
            write_file(directory / ALERTS_NAME, lines)
        write_keeps(target, {node.name: node.keeps})
    files = [path for path in target.rglob("*") if path.is_file()]
    sync_paths(files, target)
    sync_paths({path.parent for path in files} | {target}, target)
    failpoint("copy.after_files")
    return sum(entry.row.records for node in nodes for entry in node.entries.values())


def files_at(source: Address) -> int:
    """Return the number of files that a copy of a run has."""
    nodes = RemoteRun(source).nodes()
    return len(_files_of(nodes)) + len(nodes)


def _files_of(nodes: list[RemoteNode]) -> list[NamedObject]:
    return [one for one in named_objects(nodes) if not one.key.startswith(".capd/")]


def _bring(run: RemoteRun, wanted: list[NamedObject], target: Path, progress: Progress) -> str:
    """Download what is not there yet. Return how an object differs from its manifest, or ""."""

    def one_file(one: NamedObject) -> str:
        if _is_there(target / one.key, one):
            return ""
        try:
            differs = download(run.bucket, one, target)
        except FileNotFoundError:
            differs = "the manifest names it, but there is no such object"
        if differs:
            return f"{run.place / one.key}: {differs}"
        if one.nbytes is None:
            # A document without a checksum must at least be one.
            document_in((target / one.key).read_bytes(), run.place / one.key)
        progress((target / one.key).stat().st_size)
        failpoint("copy.after_file")
        return ""

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="capd-get") as pool:
        return next(filter(None, list(pool.map(one_file, wanted))), "")


def _is_there(file: Path, one: NamedObject) -> bool:
    """Return whether an earlier command has brought a file. The documents of groups are brought again."""
    if one.nbytes is None or not file.is_file() or file.stat().st_size != one.nbytes:
        return False
    crc = 0
    for piece in _pieces(file):
        crc = google_crc32c.extend(crc, piece)
    return crc == one.crc32c


def _remove_others(run: Path, wanted: list[NamedObject]) -> None:
    """Remove files that a newer manifest does not name any more, and what a killed command left."""
    keys = {one.key for one in wanted}
    for path in run.rglob("*"):
        key = path.relative_to(run).as_posix()
        if path.is_file() and not key.startswith(".capd/") and key not in keys:
            unlink(path)


def _pieces(file: Path) -> Iterator[bytes]:
    with contextlib.closing(file.open("rb")) as opened:
        while piece := opened.read(_PIECE_NBYTES):
            yield piece
