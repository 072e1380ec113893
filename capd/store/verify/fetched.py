"""The files of a run in an object store, in a temporary directory. Each shard comes there for its check alone."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from capd.errors import ObjectStoreError
from capd.store.disk.files import make_directory
from capd.store.disk.layout import node_directory
from capd.store.format.frames import SeriesHeader
from capd.store.remote.catalog_copy import write_catalog
from capd.store.remote.node import RemoteNode
from capd.store.remote.objects import NamedObject, download, shard_object
from capd.store.remote.run import RemoteRun
from capd.store.segments.manifest import node_prefix
from capd.store.verify.damage import Damage, Kind

__all__ = ["FetchedRun", "damage_of"]

_DOWNLOADS = 16


class FetchedRun:
    """The files of a run, from its objects. Several threads may use it.

    Attributes:
        path: The directory of the run.
        damaged: What differs from the manifest, by key.
        close: Removes the files.
    """

    def __init__(self, source: RemoteRun, nodes: Sequence[RemoteNode]) -> None:
        """Make the temporary directory. `close` removes it, or whoever collects this object."""
        directory = tempfile.mkdtemp(prefix="capd-verify-")
        self.close = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        self.path = Path(directory, source.place.name)
        self.damaged: dict[str, Damage] = {}
        self._source, self._nodes = source, nodes
        self._lock = threading.Lock()

    def write_catalogs(self) -> list[Damage]:
        """Write a catalog from the segments of each node. Return what cannot be had.

        Raises:
            ObjectStoreError: The store does not answer, or refuses.
        """
        found = []
        for node in self._nodes:
            make_directory(node_directory(self.path, node.name) / "spool")
            try:
                write_catalog(node, node_directory(self.path, node.name))
            except ObjectStoreError as error:
                if error.reason not in ("other", "missing"):
                    raise
                file = f"{node_prefix(node.name)}/{node.manifest.series.name}"
                found.append(Damage("catalog", "", (), file, None, str(error), node.name))
        return found

    def fetch(self, objects: Iterable[NamedObject]) -> None:
        """Write documents, and an empty file in place of each shard.

        Raises:
            ObjectStoreError: The store does not answer, or refuses.
            OSError: A file cannot be written.
        """
        documents = []
        for one in objects:
            if one.shard is None:
                documents.append(one)
            else:
                self._hide(self.path / one.key, one.nbytes or 0)
        with ThreadPoolExecutor(_DOWNLOADS, thread_name_prefix="capd-get") as pool:
            list(pool.map(self._fetch, documents))

    @contextlib.contextmanager
    def present(self, header: SeriesHeader, shard: int) -> Iterator[None]:
        """Have a shard in its file for the time of a check."""
        one = shard_object(self._nodes, header, shard)
        if one is None or not (self.path / one.key).exists():
            yield
            return
        self._fetch(one)
        try:
            yield
        finally:
            if (self.path / one.key).exists():
                self._hide(self.path / one.key, one.nbytes or 0)

    def _fetch(self, one: NamedObject) -> None:
        try:
            differs = download(self._source.bucket, one, self.path)
        except FileNotFoundError:
            differs = "the manifest names it, but there is no such object"
            (self.path / one.key).unlink(missing_ok=True)
        with self._lock:
            # A second look may find it sound.
            self.damaged.pop(one.key, None)
            if differs:
                self.damaged[one.key] = damage_of(one, differs)
        if one.key.startswith(".capd/"):
            # The local run has a catalog instead.
            (self.path / one.key).unlink(missing_ok=True)

    def _hide(self, file: Path, nbytes: int) -> None:
        """Replace a file by one of the same size without blocks on the disk."""
        make_directory(file.parent)
        with open(file, "wb") as empty:
            empty.truncate(nbytes)


def damage_of(one: NamedObject, what: str) -> Damage:
    """Return the damage of an object that a manifest names."""
    kind: Kind = "shard" if one.shard is not None else "metadata" if one.series else "catalog"
    if not one.node:
        kind = "run" if one.key == "zarr.json" else "metadata"
    return Damage(kind, one.series, (), one.key, None, what, one.node)
