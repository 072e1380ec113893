"""The catalog of a node, written again on this machine from the manifest and the segments of its upload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec

from capd.errors import ObjectStoreError
from capd.store.catalog.rows import CATALOG_NAME, SeriesRow
from capd.store.catalog.writer import Catalog, NewRow
from capd.store.format.frames import UNKNOWN_CLIENT, decode_head
from capd.store.format.ranges import RangeSet
from capd.store.remote.node import RemoteNode

__all__ = ["write_catalog"]

_BATCH = 10_000


def write_catalog(node: RemoteNode, directory: Path, mounted: str = "") -> None:
    """Write the catalog of a node into its directory, which has none.

    Args:
        node: The node.
        directory: Its directory on this machine.
        mounted: The mount under which the files of the run are intact (`capd.store.disk.power`).

    Raises:
        ObjectStoreError: The segments cannot be read.
        StoreError: The catalog cannot be written.
    """
    catalog = Catalog(directory / CATALOG_NAME)
    try:
        acked: dict[bytes, RangeSet] = {}
        rows = [entry.row for entry in node.entries.values()]
        for row in sorted(rows, key=lambda one: one.id):
            own = catalog.add_series(row.header)
            records = _records(node, row, own, acked)
            while batch := list(islice(records, _BATCH)):
                catalog.write(batch, (), {})
            catalog.write((), [replace(row, id=own)], {})
        catalog.write((), (), {client: ranges.ranges() for client, ranges in acked.items()})
        for session in node.sessions:
            catalog.save_session(session)
        catalog.mark_complete(mounted)
    finally:
        catalog.close()


def _records(node: RemoteNode, row: SeriesRow, own: int, acked: dict[bytes, RangeSet]) -> Iterator[NewRow]:
    path = row.header.path
    for first in range(0, row.records, _BATCH):
        for body in node.bodies(path, first, min(first + _BATCH, row.records)):
            try:
                head = decode_head(body.body)
            except msgspec.MsgspecError as error:
                raise ObjectStoreError(
                    f"{node.directory}: the row of {path}#{body.record}: {error}"
                ) from error
            if head.client != UNKNOWN_CLIENT:
                acked.setdefault(head.client, RangeSet()).add(head.sequence)
            yield own, body.record, head.moment.attempt, body.stored_bytes, body.body
