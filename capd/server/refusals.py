"""What a rank is told of an error that keeps its record from the store."""

from __future__ import annotations

import logging
import sqlite3

from capd.errors import NO_SPACE, StoreError, StoreFull
from capd.server.jobs import Refusal
from capd_client.counter_page import DropReason

__all__ = ["refusal_of"]

logger = logging.getLogger(__name__)


def refusal_of(error: Exception) -> Refusal:
    """Reason and text; an error that nobody expects is logged, too."""
    if isinstance(error, StoreFull) or (isinstance(error, OSError) and error.errno in NO_SPACE):
        return DropReason.DISK_FULL, str(error)
    if isinstance(error, (OSError, StoreError, sqlite3.Error)):
        return DropReason.STORE_ERROR, str(error)
    logger.error("a record could not be committed", exc_info=error)
    return DropReason.STORE_ERROR, f"internal error: {error}"
