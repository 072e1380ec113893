"""The ledger of a run: how many captures were offered, committed, dropped and left out, and why."""

from __future__ import annotations

from typing import Any

from capd.drops import left_out, lost
from capd.errors import StoreError
from capd.store.read.store import open_store

__all__ = ["ledger_data"]


def ledger_data(source: str) -> dict[str, Any]:
    """Return the counters that the run's catalogs persisted. They cover all records, whatever the report selects."""
    try:
        totals = open_store(source).totals()
    except StoreError as error:
        found: dict[str, Any] = dict.fromkeys(("offered", "committed", "in_flight"))
        return {"source": source, **found, "dropped": {}, "left_out": {}, "clean": True, "note": str(error)}
    return {
        "source": source,
        "offered": totals.offered,
        "committed": totals.committed,
        "in_flight": totals.in_flight,
        "dropped": lost(totals.dropped),
        "left_out": left_out(totals.dropped),
        "clean": totals.clean,
        "note": None,
    }
