"""Searches the series of a catalog page by page, in SQL: a run may have more series than a reader has memory for.

Series with errors of formats are no series of tensors. They are found by the tensors that they are of.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

import msgspec

from capd.store.catalog.rows import NO_ERRORS, SeriesRow, series_row
from capd.store.format.dtypes import errors_of, stored_type
from capd.store.format.frames import SeriesHeader

__all__ = ["FIELDS", "count_series", "distinct_values", "find_errors", "find_scalars", "find_series"]

FIELDS = (
    "quant_type", "rank", "layer", "tensor_name", "phase", "layer_type", "operation", "component", "module", "stack",
)  # fmt: skip
"""The fields of a key that a search may name: they are columns of the table."""

# The fixed fields of a scalar's key (`capd_client.protocol.scalars`).
_IS_SCALAR = "quant_type='scalar' AND layer_type='scalar' AND operation='step'"
_TENSORS = f"records>0 AND NOT ({_IS_SCALAR}) AND {NO_ERRORS}"
_SELECT = "SELECT id, header, records, sealed, sealing, max_shape, raw_bytes, stored_bytes FROM series WHERE "
_MOST_WORDS = 16


def find_series(
    db: sqlite3.Connection,
    words: Sequence[str],
    fields: Mapping[str, str | int],
    *,
    order: str = "path",
    first: int = 0,
    most: int = 100,
) -> list[SeriesRow]:
    """Return one page of the series of tensors that match, in the order of their paths, or of their layers.

    Args:
        db: The catalog.
        words: What the path contains, without regard to the case of ASCII letters. All of them.
        fields: Values of key fields.
        order: "path", or "layer", which leaves out series without one.
        first: The number of series before the page.
        most: The length of the page.

    Raises:
        sqlite3.DatabaseError: A row is not valid.
    """
    where, given = _where(words, fields)
    by = {"path": "path", "layer": "layer, path"}[order]
    if order == "layer":
        where += " AND layer IS NOT NULL"
    rows = db.execute(f"{_SELECT}{where} ORDER BY {by} LIMIT ? OFFSET ?", (*given, most, first))
    return [series_row(row) for row in rows]


def count_series(db: sqlite3.Connection, words: Sequence[str], fields: Mapping[str, str | int]) -> int:
    """Return the number of series that match."""
    where, given = _where(words, fields)
    (found,) = db.execute(f"SELECT COUNT(*) FROM series WHERE {where}", given).fetchone()  # noqa: S608
    return int(found)


def find_scalars(db: sqlite3.Connection, name: str | None, most: int) -> list[SeriesRow]:
    """Return the series with the key of a scalar, or of the one scalar `name`, by name and rank; `most` at most."""
    where, given = (_IS_SCALAR, ()) if name is None else (f"{_IS_SCALAR} AND tensor_name=?", (name,))
    rows = db.execute(
        f"{_SELECT}records>0 AND {NO_ERRORS} AND {where} ORDER BY tensor_name, rank LIMIT ?",
        (*given, most),
    )
    return [series_row(row) for row in rows]


def find_errors(db: sqlite3.Connection, header: SeriesHeader, most: int) -> list[SeriesRow]:
    """Return the series with the errors of formats on the records of a series; `most` of them at most."""
    key = msgspec.structs.asdict(header.key)
    where = " AND ".join(("records>0", "dtype=?", *(f"{name} IS ?" for name in key)))
    given = (errors_of(stored_type(header.dtype).torch), *key.values(), most)
    return [series_row(row) for row in db.execute(f"{_SELECT}{where} ORDER BY path LIMIT ?", given)]


def distinct_values(db: sqlite3.Connection, field: str, most: int) -> list[str | int | None]:
    """Return the values of a key field among the series of tensors, in order, `most` of them at most."""
    if field not in FIELDS:
        raise ValueError(f"{field!r} is no field of a key")
    rows = db.execute(f"SELECT DISTINCT {field} FROM series WHERE {_TENSORS} ORDER BY 1 LIMIT ?", (most,))  # noqa: S608
    return [value for (value,) in rows]


def _where(words: Sequence[str], fields: Mapping[str, str | int]) -> tuple[str, tuple[str | int, ...]]:
    unknown = fields.keys() - set(FIELDS)
    if unknown:
        raise ValueError(f"{min(unknown)!r} is no field of a key")
    known = list(words)[:_MOST_WORDS]
    tests = [_TENSORS, *["path LIKE ? ESCAPE '\\'"] * len(known), *(f"{name}=?" for name in fields)]
    return " AND ".join(tests), (*(f"%{_escaped(word)}%" for word in known), *fields.values())


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
