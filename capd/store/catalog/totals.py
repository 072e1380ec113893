"""What a run holds on one node: in its series, as their catalog rows tell, and in the files beside its shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from capd.store.catalog.rows import CATALOG_NAME, SeriesRow
from capd.store.format.dtypes import is_statistics
from capd.store.format.log_places import LOG_GLOB

__all__ = ["Held", "beside_nbytes", "held_by"]


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


def beside_nbytes(spool: Path) -> int:
    """Bytes of the small-record logs and the catalog."""
    total = 0
    for path in [*spool.glob(LOG_GLOB), *spool.parent.glob(f"{CATALOG_NAME}*")]:
        with contextlib.suppress(FileNotFoundError):  # emptied meanwhile
            total += path.stat().st_size
    return total
