"""What series hold together, as their catalog rows tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from capd.store.catalog_read import SeriesRow
from capd.store.dtypes import is_statistics

__all__ = ["Held", "held_by"]


@dataclass(frozen=True, slots=True)
class Held:
    """Committed records, and those of which statistics alone are kept. raw_bytes: of what is kept."""

    records: int = 0
    statistics_records: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0


def held_by(rows: Iterable[SeriesRow]) -> Held:
    """The sums over some series."""
    rows = list(rows)
    return Held(
        records=sum(row.records for row in rows),
        statistics_records=sum(row.records for row in rows if is_statistics(row.header.dtype)),
        raw_bytes=sum(row.raw_bytes for row in rows),
        stored_bytes=sum(row.stored_bytes for row in rows),
    )
