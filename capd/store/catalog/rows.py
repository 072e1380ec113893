"""The rows of a catalog: their types, and how they are read while a daemon may be writing."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from capd.store.documents.headers import is_usable
from capd.store.format.columns import ColumnRow
from capd.store.format.dtypes import is_errors, is_statistics
from capd.store.format.frames import RecordHead, RecordRow, SeriesHeader, decode_head, decode_row
from capd_client.protocol.key import MAX_INDEX, MAX_NDIM, Key
from capd_client.protocol.scalars import DTYPE, is_scalar

__all__ = [
    "CATALOG_NAME",
    "NO_ERRORS",
    "LedgerRow",
    "SeriesRow",
    "SessionRow",
    "has_attempt",
    "head_of",
    "read_acked",
    "read_attempts",
    "read_captures",
    "read_columns",
    "read_every",
    "read_heads",
    "read_records",
    "read_series",
    "read_stored",
    "series_row",
    "stored_between",
]

CATALOG_NAME = "catalog.sqlite"
NO_ERRORS = "dtype NOT LIKE 'errors:%'"
"""The condition, in SQL, that a series holds no errors of formats (`is_errors`)."""
H = TypeVar("H", RecordHead, RecordRow)


@dataclass(slots=True)
class LedgerRow:
    """The cumulative drops of one key for one reason in one session."""

    key: Key
    dtype: str
    reason: str
    count: int
    nbytes: int
    first_iteration: int
    last_iteration: int


@dataclass(slots=True)
class SessionRow:
    """The counters of one rank's session.

    Attributes:
        state: "live", "ended" (left in order) or "died".
        attempt: The attempt of the records.
        end: How the process ended, for a session that died; "" if unknown.
        command: The command line of the process; "" if unknown.
        shift: The part of the attempt that the daemon added, because the job continued a run that had ended.
        world_size: The ranks of the job; 0 if unknown.
    """

    client: bytes
    rank: int
    attempt: int
    host: str
    pid: int
    started_ns: int
    ended_ns: int | None
    state: str
    offered: int
    committed: int
    in_flight: int
    dropped: dict[str, int]
    drops: list[LedgerRow] = field(default_factory=list)
    end: str = ""
    command: str = ""
    shift: int = 0
    world_size: int = 0
    let_go: dict[str, int] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Whether the counters are final.

        They are not final if the daemon died during the session. They are not final if captures were still in work at
        the end of the session.
        """
        return self.state != "live" and not self.in_flight


@dataclass(slots=True)
class SeriesRow:
    """One series in the catalog. stored_bytes: the encoded payloads and the frames."""

    id: int
    header: SeriesHeader
    records: int
    sealed: int
    sealing: bool
    max_shape: tuple[int, ...]
    raw_bytes: int
    stored_bytes: int

    @property
    def holds_scalars(self) -> bool:
        """Whether the records are scalars, and no tensors."""
        return is_scalar(self.header.key) and self.header.dtype == DTYPE and self.max_shape == ()

    @property
    def holds_errors(self) -> bool:
        """Whether the records are errors of formats on records of other series."""
        return is_errors(self.header.dtype)

    @property
    def holds_tensors(self) -> bool:
        """Whether the records are tensors, or the statistics of tensors."""
        return not self.holds_scalars and not self.holds_errors


_SELECT_SERIES = "SELECT id, header, records, sealed, sealing, max_shape, raw_bytes, stored_bytes FROM series"
_decode_header = msgspec.msgpack.Decoder(SeriesHeader).decode


def read_series(db: sqlite3.Connection, path: str | None = None) -> list[SeriesRow]:
    """Return all series of a catalog, or the one at `path`.

    Raises:
        sqlite3.DatabaseError: A row is not valid.
    """
    where, given = ("", ()) if path is None else (" WHERE path=?", (path,))
    found: list[SeriesRow] = []
    for row in db.execute(_SELECT_SERIES + where, given):
        found.append(series_row(row))
        # Pages that form a circle give a row again.
        if len(found) > 1 and found[-2].id >= found[-1].id:
            raise sqlite3.DatabaseError(f"series {found[-1].id} occurs twice")
    return found


def series_row(row: tuple[Any, ...]) -> SeriesRow:
    """Return the series in a row of the catalog.

    Args:
        row: id, header, records, sealed, sealing, max_shape as JSON, raw_bytes and stored_bytes.

    Raises:
        sqlite3.DatabaseError: The row is not valid.
    """
    identity, header, records, sealed, sealing, max_shape, raw, stored = row
    try:
        shape = tuple(json.loads(max_shape))
        found = SeriesRow(
            identity, _decode_header(header), records, sealed, bool(sealing), shape, raw, stored
        )
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise sqlite3.DatabaseError(f"the row of series {identity!r} cannot be read: {error}") from error
    if not is_usable(found.header):
        raise sqlite3.DatabaseError(f"the header of series {found.header.path!r} is not valid")
    counts = (identity, records, sealed, raw, stored, *shape)
    if not all(type(n) is int and 0 <= n <= MAX_INDEX for n in counts) or not _is_within(found):
        raise sqlite3.DatabaseError(f"the totals of series {found.header.path} are not valid")
    return found


def _is_within(row: SeriesRow) -> bool:
    """Return whether records of the largest shape fit the series."""
    anything = is_statistics(row.header.dtype) or not row.records
    return len(row.max_shape) <= MAX_NDIM if anything else row.header.geometry.fits(row.max_shape)


def read_captures(database: sqlite3.Connection) -> Iterator[tuple[bytes, int]]:
    """Yield client and sequence of every record."""
    for (body,) in database.execute("SELECT body FROM records"):
        head = head_of(body)
        yield head.client, head.sequence


def read_acked(db: sqlite3.Connection) -> dict[bytes, list[tuple[int, int]]]:
    """Return the committed sequence ranges of each client uuid.

    Raises:
        sqlite3.DatabaseError: A row is not valid.
    """
    try:
        found = {bytes(client): _decode_ranges(ranges) for client, ranges in db.execute(_SELECT_ACKED)}
    except (msgspec.MsgspecError, TypeError) as error:
        raise sqlite3.DatabaseError(f"the acknowledged ranges cannot be read: {error}") from error
    for ranges in found.values():
        ends = [end for both in ranges for end in both] or [0]
        if ends != sorted(ends) or not 0 <= ends[0] <= ends[-1] < MAX_INDEX:
            raise sqlite3.DatabaseError("the acknowledged ranges are not in order")
    return found


_SELECT_ACKED = "SELECT client, ranges FROM acked"
_decode_ranges = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode


_SELECT_ROWS = (
    "SELECT record, attempt, body FROM records WHERE series=? AND record>=? AND record<? ORDER BY record"
)


def read_records(
    db: sqlite3.Connection, series: int, first: int = 0, last: int = 2**62
) -> Iterator[tuple[int, RecordRow]]:
    """Yield the records first ≤ number < last of a series, from any connection.

    Raises:
        sqlite3.DatabaseError: A row is not valid.
    """
    return _rows(db.execute(_SELECT_ROWS, (series, first, last)), series, decode_row)


def read_every(db: sqlite3.Connection, series: int, step: int, most: int) -> Iterator[tuple[int, RecordRow]]:
    """Yield the records of a series whose number is a multiple of `step`, `most` of them at most.

    Raises:
        sqlite3.DatabaseError: A row is not valid.
    """
    return _rows(db.execute(_SELECT_EVERY, (series, step, most)), series, decode_row)


def read_heads(
    db: sqlite3.Connection, series: int, first: int, last: int
) -> Iterator[tuple[int, RecordHead]]:
    """Yield the first fields of the same records, for a fraction of the cost of their rows."""
    return _rows(db.execute(_SELECT_ROWS, (series, first, last)), series, decode_head)


class _Column(msgspec.Struct, array_like=True, gc=False):
    """The shape and the moment of a RecordRow. The moment is a plain tuple."""

    client: msgspec.Raw
    sequence: msgspec.Raw
    shape: tuple[int, ...]
    nbytes: msgspec.Raw
    moment: tuple[Any, ...]


_decode_column = msgspec.msgpack.Decoder(_Column).decode


def read_columns(db: sqlite3.Connection, series: int, first: int, last: int) -> list[ColumnRow]:
    """Return the moments and shapes of the same records, for half the cost of their heads."""
    bodies = db.execute(
        "SELECT body FROM records WHERE series=? AND record>=? AND record<? ORDER BY record",
        (series, first, last),
    )
    try:
        return [(*found.moment, found.shape) for (body,) in bodies for found in (_decode_column(body),)]
    except (msgspec.MsgspecError, TypeError) as error:
        raise sqlite3.DatabaseError(f"the rows of series {series} cannot be read: {error}") from error


_SELECT_EVERY = (
    "SELECT record, attempt, body FROM records WHERE series=? AND record%?=0 ORDER BY record LIMIT ?"
)


def _rows(found: sqlite3.Cursor, series: int, decode: Callable[[bytes], H]) -> Iterator[tuple[int, H]]:
    number = before = -1
    try:
        for number, attempt, body in found:
            row = decode(body)
            if type(number) is not int or number <= before:
                raise msgspec.ValidationError("its number is not an integer, or is out of order")
            before = number
            if row.moment.attempt != attempt:
                raise msgspec.ValidationError(f"its attempt {row.moment.attempt} is filed under {attempt}")
            yield number, row
    except (msgspec.MsgspecError, TypeError) as error:
        raise sqlite3.DatabaseError(f"record {number} of series {series} cannot be read: {error}") from error


def head_of(body: bytes) -> RecordHead:
    """Return the first fields of a row's body.

    Raises:
        sqlite3.DatabaseError: The body is not valid.
    """
    try:
        return decode_head(body)
    except (msgspec.MsgspecError, TypeError) as error:
        raise sqlite3.DatabaseError(f"a record's row cannot be read: {error}") from error


def read_attempts(db: sqlite3.Connection, series: int) -> tuple[int, int] | None:
    """Return the first and the last attempt with records of a series; None if it has no records."""
    first, last = db.execute(
        "SELECT MIN(attempt), MAX(attempt) FROM records WHERE series=?", (series,)
    ).fetchone()
    return None if first is None else (first, last)


def read_stored(db: sqlite3.Connection, series: int) -> Iterator[tuple[int, int]]:
    """Yield number and stored bytes of the records of a series.

    Raises:
        sqlite3.DatabaseError: A row is not valid.
    """
    for number, nbytes in db.execute("SELECT record, stored_nbytes FROM records WHERE series=?", (series,)):
        if type(number) is not int or type(nbytes) is not int or nbytes < 0:
            raise sqlite3.DatabaseError(f"record {number!r} of series {series} has no valid size")
        yield number, nbytes


def stored_between(db: sqlite3.Connection, series: int, first: int, last: int) -> int:
    """Return the stored bytes of the records first ≤ number < last of a series."""
    (total,) = db.execute(
        "SELECT TOTAL(stored_nbytes) FROM records WHERE series=? AND record>=? AND record<?",
        (series, first, last),
    ).fetchone()
    return int(total)


def has_attempt(db: sqlite3.Connection, attempt: int) -> set[int]:
    """Return the ids of the series that have a record of this attempt."""
    return {
        series for (series,) in db.execute("SELECT DISTINCT series FROM records WHERE attempt=?", (attempt,))
    }
