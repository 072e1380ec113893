"""The rows that an earlier upload brought, for records of which the local catalog knows only the published columns.

A catalog that is lost while the object store is away is built again without the statistics, metadata and clients of
records in moved shards. The segments have them. An upload must not replace what only they have.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from capd.errors import CapdError, ObjectStoreError
from capd.store.catalog.rows import SeriesRow, head_of
from capd.store.format.frames import UNKNOWN_CLIENT, decode_row
from capd.store.objects.bucket import Bucket
from capd.store.remote.node import RemoteNode
from capd.store.remote.windows import WindowCache
from capd.store.segments.series_table import SeriesEntry

__all__ = ["UploadedRows"]

logger = logging.getLogger(__name__)

_AT_ONCE = 4096


class UploadedRows:
    """The rows of the last manifest. No request is made before a local row lacks its client."""

    def __init__(self, bucket: Bucket, node: str, entries: Mapping[str, SeriesEntry]) -> None:
        """Prepare it.

        Args:
            bucket: The place of the run.
            node: The name of the node.
            entries: The series of the last manifest, by path.
        """
        self._bucket, self._name, self._entries = bucket, node, entries
        self._node: RemoteNode | None = None
        # The rows that were read last, by number, and of which series and part they are.
        self._at: tuple[str, int] = ("", -1)
        self._bodies: dict[int, bytes] = {}
        self._damaged: set[str] = set()

    def completed(self, row: SeriesRow, number: int, body: bytes) -> bytes:
        """Return the uploaded row of a record if the local one lacks its client, and both have one moment and shape.

        Raises:
            ObjectStoreError: The object store does not answer.
        """
        path = row.header.path
        entry = self._entries.get(path)
        if entry is None or number >= entry.row.records or head_of(body).client != UNKNOWN_CLIENT:
            return body
        if entry.row.header.geometry != row.header.geometry or path in self._damaged:
            return body
        try:
            there = self._body(entry, number)
            known, uploaded = decode_row(body), decode_row(there)
        except (CapdError, msgspec.MsgspecError, ValueError, TypeError) as error:
            is_gone = isinstance(error, FileNotFoundError)
            if isinstance(error, ObjectStoreError) and error.reason != "other" and not is_gone:
                raise
            self._damaged.add(path)
            logger.warning("%s: the rows that were uploaded cannot be read: %s", path, error)
            return body
        return there if (known.moment, known.shape) == (uploaded.moment, uploaded.shape) else body

    def _body(self, entry: SeriesEntry, number: int) -> bytes:
        path, first = entry.row.header.path, number // _AT_ONCE * _AT_ONCE
        if self._at != (path, first):
            if self._node is None:
                self._node = RemoteNode(self._bucket, WindowCache(self._bucket), self._name)
            found = self._node.bodies(path, first, min(first + _AT_ONCE, entry.row.records))
            self._bodies = {one.record: one.body for one in found}
            self._at = (path, first)
        return self._bodies[number]
