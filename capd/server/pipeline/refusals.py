"""The refusals of the pipeline: the reason and text for an error that keeps a record from the store."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from capd.errors import QuotaReached, StoreError, StoreFull
from capd.server.pipeline.jobs import Refusal
from capd.space import if_full
from capd_client.protocol.counter_page import DropReason

__all__ = ["refusal_of"]

logger = logging.getLogger(__name__)


def refusal_of(error: Exception, place: Path) -> Refusal:
    """Return the reason and text of an error on the file system of `place`. An unexpected error is also logged."""
    error = if_full(error, place)
    if isinstance(error, QuotaReached):
        return DropReason.QUOTA, str(error)
    if isinstance(error, StoreFull):
        return DropReason.DISK_FULL, f"the full disk refuses a record: {error}"
    if isinstance(error, (OSError, StoreError, sqlite3.Error)):
        return DropReason.STORE_ERROR, str(error)
    logger.error("a record could not be committed", exc_info=error)
    return DropReason.STORE_ERROR, f"internal error: {error}"
