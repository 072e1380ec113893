"""The ledger of a run: how many captures were offered, committed and dropped, and why."""

from __future__ import annotations

from typing import Any

from capd.errors import StoreError
from capd.store.read.store import open_store

__all__ = ["ledger_data"]


def ledger_data(source: str) -> dict[str, Any]:
    """Return the counters that the run's catalogs persisted. They cover all records, whatever the report selects."""
    try:
        totals = open_store(source).totals()
    except StoreError as error:
        found: dict[str, Any] = dict.fromkeys(("offered", "committed", "in_flight"))
        return {"source": source, **found, "dropped": {}, "note": str(error)}
    note = None if totals.clean else "a kill cut off the last second of some rank's counters"
    return {
        "source": source,
        "offered": totals.offered,
        "committed": totals.committed,
        "in_flight": totals.in_flight,
        "dropped": dict(totals.dropped),
        "note": note,
    }
