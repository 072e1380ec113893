"""The totals of a run on one node: of its series, from their catalog rows, and of the files beside its shards."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from capd.store.catalog.rows import CATALOG_NAME, NO_ERRORS, SeriesRow, head_of
from capd.store.documents.json_document import MAX_LENGTH
from capd.store.format.dtypes import is_errors, is_statistics
from capd.store.format.log_places import LOG_GLOB

__all__ = ["Held", "held_by", "iterations_in", "log_and_catalog_nbytes", "quant_types_in", "sums_in"]


@dataclass(frozen=True, slots=True)
class Held:
    """The totals of some series.

    Attributes:
        records: The committed records, without errors of formats.
        statistics_records: The records that consist of statistics alone.
        scalar_records: The records that are scalars.
        error_records: The errors of formats on records (`capd.lab`). They count as stored bytes alone.
        raw_bytes: The bytes of the kept elements or statistics before encoding.
        stored_bytes: The bytes of the encoded payloads and the frames.
    """

    records: int = 0
    statistics_records: int = 0
    scalar_records: int = 0
    error_records: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0

    @property
    def rows(self) -> int:
        """Everything that was committed: records, and errors of formats."""
        return self.records + self.error_records


def held_by(rows: Iterable[SeriesRow]) -> Held:
    """Return the totals of some series."""
    everything = list(rows)
    rows = [row for row in everything if not is_errors(row.header.dtype)]
    return Held(
        records=sum(row.records for row in rows),
        statistics_records=sum(row.records for row in rows if is_statistics(row.header.dtype)),
        scalar_records=sum(row.records for row in rows if row.holds_scalars),
        error_records=sum(row.records for row in everything) - sum(row.records for row in rows),
        raw_bytes=sum(row.raw_bytes for row in rows),
        stored_bytes=sum(row.stored_bytes for row in everything),
    )


def sums_in(database: sqlite3.Connection) -> Held:
    """Return the totals of a catalog by a query, without a look at single series: only `scalar_records` and
    `statistics_records` are not counted.

    Raises:
        sqlite3.DatabaseError: The catalog is damaged.
    """
    found = database.execute(
        f"SELECT TOTAL(records * ({NO_ERRORS})), TOTAL(records * NOT ({NO_ERRORS})), "  # noqa: S608 - a constant
        f"TOTAL(raw_bytes * ({NO_ERRORS})), TOTAL(stored_bytes) FROM series"
    ).fetchone()
    if not all(0 <= total <= MAX_LENGTH for total in found):
        raise sqlite3.DatabaseError("the totals in it are not valid")
    records, errors, raw, stored = map(int, found)
    return Held(records, error_records=errors, raw_bytes=raw, stored_bytes=stored)


def log_and_catalog_nbytes(spool: Path) -> int:
    """Return the bytes of the small-record logs and of the catalog."""
    total = 0
    for path in [*spool.glob(LOG_GLOB), *spool.parent.glob(f"{CATALOG_NAME}*")]:
        # An emptied log may be deleted in the meantime.
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def quant_types_in(database: sqlite3.Connection) -> list[str]:
    """Return the quant types of tensors with records."""
    found = database.execute(
        "SELECT DISTINCT quant_type FROM series WHERE quant_type != 'scalar' AND records ORDER BY quant_type"
    )
    return [str(name) for (name,) in found]


def iterations_in(database: sqlite3.Connection) -> tuple[int, int] | None:
    """Return the first and the last iteration of the series' first and last records; None without records.

    Raises:
        sqlite3.DatabaseError: A row is not valid.
    """
    ends = database.execute(
        "SELECT records.body FROM series JOIN records ON records.series = series.id "
        "AND records.record IN (0, series.records - 1)"
    )
    found = [head_of(body).moment.iteration for (body,) in ends]
    return (min(found), max(found)) if found else None
