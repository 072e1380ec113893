"""The rank counters in the catalog, kept current without anybody waiting for the disk."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass

from capd.server.pipeline.pipeline import Pipeline
from capd.server.rank.rank import RankSession

__all__ = ["SAVE_INTERVAL_S", "RowKeeper"]

logger = logging.getLogger(__name__)

# With the clock's tick, counters on disk are less than a second old.
SAVE_INTERVAL_S = 0.5


@dataclass(slots=True)
class _Saved:
    # The state that was last handed to the catalog.
    mark: object = None
    at: float = -SAVE_INTERVAL_S
    future: Future[None] | None = None


class RowKeeper:
    """The saved rows of the ranks. It hands a changed row to the pipeline; only the daemon's clock uses it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._saved: dict[bytes, _Saved] = {}

    def update(self, rank: RankSession, now: float) -> bool:
        """Save the rank's row if it changed. Return True if the catalog holds the current row.

        A new save never starts before the last one is done. A failed save is logged and retried.
        """
        row = rank.row()
        mark = (
            row.state,
            row.end,
            row.offered,
            row.committed,
            row.in_flight,
            dict(row.dropped),
            rank.ledger_version,
        )
        saved = self._saved.setdefault(row.client, _Saved())
        if saved.future is not None:
            if not saved.future.done():
                return False
            error = saved.future.exception()
            saved.future = None
            if error is not None:
                logger.error("counters of rank %d could not be saved: %s; retrying", row.rank, error)
                saved.mark = None
        if mark == saved.mark:
            return True
        if now - saved.at >= SAVE_INTERVAL_S:
            saved.mark, saved.at = mark, now
            saved.future = self._pipeline.save_session(rank.run_id, row)
        return False

    def forget(self, rank: RankSession) -> None:
        """Forget a rank that is finished and saved."""
        self._saved.pop(rank.client, None)
