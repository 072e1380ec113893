"""The rows of records in moved shards, read from the segments of the run's upload, when the local catalog is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from capd.errors import CapdError, ObjectStoreError
from capd.store.documents.headers import sound_row
from capd.store.format.frames import decode_row
from capd.store.objects.address import Address
from capd.store.objects.bucket import Bucket
from capd.store.remote.node import RemoteNode
from capd.store.remote.windows import WindowCache
from capd.store.scan.survey import SurveyedSeries
from capd.store.segments.record_table import BodyRow

__all__ = ["MovedRows"]

logger = logging.getLogger(__name__)

# A rank waits for the opening of its run. A store that hangs would hold it for many minutes.
_PATIENCE_S = 20.0
T = TypeVar("T")


class MovedRows:
    """Completes the rows of surveyed series. No request is made before one has moved shards.

    An object store that does not answer for a while is not asked again.
    """

    def __init__(self, node: str) -> None:
        """Prepare it. node: the name of the node that wrote the series."""
        self._name = node
        # None: it could not be read.
        self._nodes: dict[Address, RemoteNode | None] = {}

    def __call__(self, found: SurveyedSeries) -> None:
        """Replace the rows that only the published moments describe, as far as the object store has them.

        A row counts only if it has the published moment and shape. A store that does not answer is a warning.
        """
        for to in {moved.to for moved in found.moved.values()}:
            node = self._node(to)
            if node is None:
                continue
            try:
                completed = self._complete(found, node, to)
            except (
                CapdError,
                msgspec.MsgspecError,
                ValueError,
                TypeError,
                ArithmeticError,
                LookupError,
            ) as error:
                self._fail(to, error)
                continue
            logger.info("%s: read the rows of %d moved records from %s", found.header.path, completed, to)

    def _complete(self, found: SurveyedSeries, node: RemoteNode, to: Address) -> int:
        path, per_shard = found.header.path, found.header.geometry.shard_records
        entry = _soon(lambda: node.entries).get(path)
        if entry is None or entry.row.header.geometry != found.header.geometry:
            return 0
        completed = 0
        for shard, moved in found.moved.items():
            first, last = shard * per_shard, min((shard + 1) * per_shard, entry.row.records)
            bodies: list[BodyRow] = []
            if moved.to == to:
                bodies = _soon(partial(_bodies, node, path, first, last))
            for body in bodies:
                row, known = sound_row(decode_row(body.body), found.header), found.rows.get(body.record)
                if known is not None and (known.moment, known.shape) == (row.moment, row.shape):
                    found.stored_nbytes += body.stored_bytes - found.shares.get(body.record, 0)
                    found.rows[body.record], found.shares[body.record] = row, body.stored_bytes
                    completed += 1
        return completed

    def _node(self, to: Address) -> RemoteNode | None:
        if to not in self._nodes:
            try:
                bucket = Bucket(to, is_new=False)
                self._nodes[to] = _soon(lambda: RemoteNode(bucket, WindowCache(bucket), self._name))
            except CapdError as error:
                self._fail(to, error)
        return self._nodes[to]

    def _fail(self, to: Address, error: Exception) -> None:
        self._nodes[to] = None
        logger.warning(
            "the rows of moved records cannot be read from %s, so their statistics and metadata are unknown here: %s",
            to, error,
        )  # fmt: skip


def _bodies(node: RemoteNode, path: str, first: int, last: int) -> list[BodyRow]:
    return list(node.bodies(path, first, last))


def _soon(ask: Callable[[], T]) -> T:
    """Return what an object store answers within some seconds. The request of one that hangs is left alone.

    Raises:
        ObjectStoreError: It did not answer.
        BaseException: What `ask` raises.
    """
    answers: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:
            failures.append(error)

    # Not an executor: its threads would hold the end of the interpreter.
    thread = threading.Thread(target=run, name="capd-moved-rows", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    if failures:
        raise failures[0]
    if not answers:
        raise ObjectStoreError(f"no answer within {_PATIENCE_S:.0f} s", reason="unreachable", retry=True)
    return answers[0]
