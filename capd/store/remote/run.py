"""A run in an object store: its nodes, found by one listing, and its attributes, which the manifests repeat."""

from __future__ import annotations

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from capd.errors import CapdError, NotAStore, RemovedRun
from capd.store.documents.tombstone import tombstone_in
from capd.store.objects.address import Address
from capd.store.objects.bucket import Bucket, Head
from capd.store.remote.node import RemoteNode
from capd.store.remote.windows import WindowCache
from capd.store.segments.manifest import MANIFEST_NAME

__all__ = ["RemoteRun", "remote_runs", "run_places"]

logger = logging.getLogger(__name__)

_OF_NODE = re.compile(r"\.capd/node=([A-Za-z0-9][A-Za-z0-9._-]{0,127})/([^/]+)")
# A node has about ten objects there.
_MAX_OBJECTS = 200_000
_NAMED = 5
_AT_ONCE = 16


class RemoteRun:
    """The source of a Store: the nodes of a run in an object store.

    Attributes:
        place: The address of the run.
        bucket: Its objects.
        without_manifest: The nodes with objects of a catalog, but without a manifest that names them.
    """

    def __init__(self, place: Address) -> None:
        """Prepare the access.

        Raises:
            NotAStore: There is no such directory.
            CapdError: The extra `store` is not installed.
        """
        self.place = place
        self.without_manifest: set[str] = set()
        try:
            self.bucket = Bucket(place, is_new=False)
        except FileNotFoundError as error:
            raise NotAStore(f"{place} is no run{_there(place)}") from error
        self._cache = WindowCache(self.bucket)
        self._nodes: dict[str, RemoteNode] = {}

    def nodes(self, *, may_be_none: bool = False) -> list[RemoteNode]:
        """Return the views of all nodes. A manifest that has not changed is not read again.

        Args:
            may_be_none: Whether a run without a manifest is no error.

        Raises:
            NotAStore: It is not a run, or a newer capd wrote it.
            ObjectStoreError: It cannot be read.
        """
        heads = self._manifests()
        if not heads and not may_be_none:
            raise self._no_run()
        held = {name: node for name, node in self._nodes.items() if name in heads}
        changed = [
            name
            for name, head in heads.items()
            if name not in held or head.etag is None or held[name].etag != head.etag
        ]
        if len(changed) > 1:
            with ThreadPoolExecutor(min(_AT_ONCE, len(changed)), thread_name_prefix="capd-get") as pool:
                held |= zip(changed, pool.map(self.node, changed), strict=True)
        else:
            held |= {name: self.node(name) for name in changed}
        self._nodes = {name: held[name] for name in heads}
        return list(self._nodes.values())

    @property
    def opened(self) -> list[RemoteNode]:
        """The views that `nodes` returned last."""
        return list(self._nodes.values())

    @property
    def started_ns(self) -> int:
        """When the first rank came, else when the first manifest was written; after `nodes`."""
        manifests = [node.manifest for node in self._nodes.values()]
        started = [row.started_ns for one in manifests for row in one.sessions]
        return min(started or [one.written_ns for one in manifests])

    def _manifests(self) -> dict[str, Head]:
        """Return the manifest objects by node, in order. One request."""
        found: dict[str, Head] = {}
        names: set[str] = set()
        for head in islice(self.bucket.listing(".capd/"), _MAX_OBJECTS):
            if (named := _OF_NODE.fullmatch(head.key)) is not None:
                names.add(named[1])
                if named[2] == MANIFEST_NAME:
                    found[named[1]] = head
        without = names - found.keys()
        for name in sorted(without - self.without_manifest):
            logger.warning(
                "%s: node %s has no manifest, so its records are not shown; its upload has just begun, or "
                "`capd upload` on that node writes it again", self.place, name,
            )  # fmt: skip
        self.without_manifest = without
        return dict(sorted(found.items()))

    def names(self) -> list[str]:
        """Return the names of the nodes, whether their manifests can be read or not.

        Raises:
            NotAStore: It is not a run.
            ObjectStoreError: The run cannot be listed.
        """
        found = list(self._manifests())
        if not found:
            raise self._no_run()
        return found

    def node(self, name: str) -> RemoteNode:
        """Return a new view of one node.

        Raises:
            NotAStore: A newer capd wrote it.
            ObjectStoreError: Its manifest cannot be read.
        """
        return RemoteNode(self.bucket, self._cache, name)

    def _no_run(self) -> NotAStore:
        return NotAStore(f"{self.place} is no run with a manifest of capd{_there(self.place)}")

    def attributes(self) -> dict[str, Any]:
        """Return the `capd` attributes of the run, as the last manifest repeats them.

        Raises:
            RemovedRun: The run was removed.
        """
        newest = max((node.manifest for node in self._nodes.values()), key=lambda one: one.written_ns)
        if (mark := tombstone_in(newest.attributes)) is not None:
            raise RemovedRun(f"{self.place} was {mark}")
        return {"run_id": newest.run_id, **newest.attributes}


def remote_runs(prefix: Address) -> list[RemoteRun]:
    """Return the runs directly below a prefix, with their manifests, oldest first.

    One request lists the runs; each run then takes one for its nodes, and one for each manifest. A run whose first
    upload is not complete has no manifest yet, and is left out.

    Raises:
        ObjectStoreError: The prefix or a manifest cannot be read.
    """
    found = [RemoteRun(place) for place in run_places(prefix)]
    if not found:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(found)), thread_name_prefix="capd-get") as pool:
        complete = list(pool.map(_has_nodes, found))
    readable = [run for run, is_readable in zip(found, complete, strict=True) if is_readable]
    return sorted(readable, key=lambda run: (run.started_ns, run.place))


def _has_nodes(run: RemoteRun) -> bool:
    return bool(run.nodes(may_be_none=True))


def run_places(prefix: Address) -> list[Address]:
    """Return the addresses of the runs directly below a prefix, by name. One request.

    Raises:
        ObjectStoreError: The prefix cannot be listed.
    """
    bucket = Bucket(prefix, is_new=False)
    return [prefix / name for name in bucket.names()[0] if name.endswith(".zarr")]


def _there(place: Address) -> str:
    """Return what is at an address instead of a run, or beside it, for a message."""
    for where, how in ((place, "it holds the runs"), (place.parent, f"{place.parent} holds the runs")):
        try:
            runs = [run.name for run in run_places(where)]
        except CapdError:
            continue
        if runs:
            some = ", ".join(runs[-_NAMED:]) + (", …" if len(runs) > _NAMED else "")
            return f"; {how} {some}"
    return "; check the address: there is no run at it or beside it"
