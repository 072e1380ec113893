"""Writes measured errors into the runs: rows of series that lie beside those of the tensors."""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from capd.errors import StoreError, StoreFull
from capd.lab.stored_errors import MeasuredRow
from capd.server.lab.copies import RecordCopy
from capd.server.lab.outcomes import LabFigures
from capd.server.limits import DiskBudget
from capd.store.format.dtypes import errors_of
from capd.store.format.frames import RecordRow
from capd.store.run.run_store import RunStore
from capd.store.shards.series import Plan

__all__ = ["ErrorWriter", "OnStored"]

logger = logging.getLogger(__name__)

# The room of one format in a row. Rows that need more get a wider series.
_FORMAT_NBYTES = 1024
_HEAD_NBYTES = 256

Post = Callable[[str, Callable[[RunStore], None]], Future[Any]]
OnStored = Callable[[str, Sequence[MeasuredRow]], None]


@dataclass(slots=True)
class _Author:
    """The client of a run's rows. Their sequences have no gap, so that readers of a growing run see all of them."""

    client: bytes = field(default_factory=lambda: uuid.uuid4().bytes)
    next: int = 1


class ErrorWriter:
    """The writer of one daemon. `write` belongs to the lab's thread, and hands the rows to the append thread."""

    def __init__(
        self,
        attributes: dict[str, Any],
        formats: int,
        post: Post,
        budget: DiskBudget,
        figures: LabFigures,
        on_stored: OnStored | None = None,
    ) -> None:
        """Remember where to write.

        Args:
            attributes: The attributes of the rows' series: how they were measured.
            formats: The number of formats of a row.
            post: Runs an action with a run's store on the append thread.
            budget: Admits the bytes of rows.
            figures: Counts the rows.
            on_stored: Is told of stored rows on the append thread, at once and without waiting. None: nobody asks.
        """
        self._attributes, self._post, self._budget, self._figures = attributes, post, budget, figures
        self._on_stored = on_stored
        self._row_nbytes = _HEAD_NBYTES + _FORMAT_NBYTES * formats
        self._authors: dict[str, _Author] = {}
        self._has_said = False
        self._last: Future[Any] | None = None

    def write(self, run_id: str, rows: Sequence[tuple[RecordCopy, bytes]]) -> None:
        """Write rows of a run after everything that it has so far. Does not wait."""
        author = self._authors.setdefault(run_id, _Author())
        done = self._post(run_id, partial(self._commit, run_id, rows, author))
        done.add_done_callback(partial(self._count, run_id, len(rows)))
        self._last = done

    def wait(self, timeout_s: float) -> None:
        """Wait until all rows are written or refused, at most `timeout_s`."""
        if self._last is not None:
            # The append thread takes them in order.
            wait([self._last], timeout_s)

    def _commit(
        self, run_id: str, rows: Sequence[tuple[RecordCopy, bytes]], author: _Author, store: RunStore
    ) -> None:
        planned = [self._planned(store, copy, data) for copy, data in rows]
        opened = {id(plan) for plan, _ in planned if plan.series is None}
        nbytes = 2 * sum(len(data) for _, data in planned)
        if (refusal := self._budget.refusal(nbytes, new_series=len(opened))) is not None:
            raise StoreFull(refusal)
        records = [
            (plan, self._row(plan, copy, data, author, at), data)
            for at, ((plan, data), (copy, _)) in enumerate(zip(planned, rows, strict=True))
        ]
        store.commit_small(records)
        author.next += len(records)
        if self._on_stored is not None:
            self._on_stored(
                run_id, [MeasuredRow(copy.series, copy.define.key, copy.moment, data) for copy, data in rows]
            )
        with contextlib.suppress(OSError, StoreError):
            # The rows are in the log. They move to a shard with the next ones, or at the seal.
            store.maintain()

    def _planned(self, store: RunStore, copy: RecordCopy, data: bytes) -> tuple[Plan, bytes]:
        define, shape = copy.define, (max(len(data), self._row_nbytes),)
        plan = store.plan(define.key, errors_of(define.dtype), self._attributes, shape, data)
        return plan, data

    def _row(self, plan: Plan, copy: RecordCopy, data: bytes, author: _Author, at: int) -> RecordRow:
        own = (
            "" if plan.header.attributes == self._attributes else json.dumps(self._attributes, sort_keys=True)
        )
        return RecordRow(
            author.client, author.next + at, (len(data),), len(data), copy.moment, attributes=own
        )

    def _count(self, run_id: str, rows: int, done: Future[Any]) -> None:
        error = done.exception()
        self._figures.count("measured" if error is None else "not_stored", rows)
        if error is not None and not self._has_said:
            self._has_said = True
            logger.warning("[lab] the errors of %d records of run %s are not stored: %s", rows, run_id, error)
