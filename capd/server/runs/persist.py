"""Keeps the ranks' counters in the catalog current, without anybody waiting for the disk."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass

from capd.server.pipeline.pipeline import Pipeline
from capd.server.rank.rank import RankSession

__all__ = ["SAVE_INTERVAL_S", "RowKeeper"]

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S = 0.5  # with the clock's tick, counters on disk are less than a second old


@dataclass(slots=True)
class _Saved:
    mark: object = None  # what was handed to the catalog last
    at: float = -SAVE_INTERVAL_S
    future: Future[None] | None = None


class RowKeeper:
    """Hands a rank's row to the pipeline when it changed; used by the daemon's clock only."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._saved: dict[bytes, _Saved] = {}

    def update(self, rank: RankSession, now: float) -> bool:
        """Save the rank's row if it changed; True when the catalog holds its present state.

        A save in progress is never overtaken; a failed one is logged and tried again.
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
                logger.error("counters of rank %d could not be saved: %s; trying again", row.rank, error)
                saved.mark = None
        if mark == saved.mark:
            return True
        if now - saved.at >= SAVE_INTERVAL_S:
            saved.mark, saved.at = mark, now
            saved.future = self._pipeline.save_session(rank.run_id, row)
        return False

    def forget(self, rank: RankSession) -> None:
        """The rank is finished and saved."""
        self._saved.pop(rank.client, None)
