"""The counters of the sessions in a catalog. They are in no frame."""

from __future__ import annotations

import sqlite3

import msgspec

from capd.store.catalog.rows import SessionRow
from capd_client.protocol.key import MAX_INDEX

__all__ = ["read_sessions"]

_STATES = {"live", "ended", "died"}
_decode = msgspec.msgpack.Decoder(SessionRow).decode


def read_sessions(db: sqlite3.Connection) -> list[SessionRow]:
    """Return all sessions of a catalog.

    Raises:
        sqlite3.DatabaseError: A row is not valid.
    """
    return [_session(client, body) for client, body in db.execute("SELECT client, body FROM sessions")]


def _session(client: bytes, body: bytes) -> SessionRow:
    try:
        row = _decode(body)
    except (msgspec.MsgspecError, TypeError, RecursionError) as error:
        raise sqlite3.DatabaseError(f"a session's row cannot be read: {error}") from error
    if row.client != client:
        raise sqlite3.DatabaseError(f"the session of client {row.client.hex()} is filed under another client")
    if row.state not in _STATES:
        raise sqlite3.DatabaseError(f"the session of client {row.client.hex()} has an unknown state")
    counters = (
        row.rank,
        row.attempt,
        row.shift,
        row.world_size,
        row.offered,
        row.committed,
        row.in_flight,
        *row.dropped.values(),
        *row.let_go.values(),
    )
    drops = (n for drop in row.drops for n in (drop.count, drop.nbytes))
    if not all(0 <= n <= MAX_INDEX for n in (*counters, *drops)):
        raise sqlite3.DatabaseError(f"the counters of client {row.client.hex()} are not valid")
    if row.shift > row.attempt:
        raise sqlite3.DatabaseError(f"the attempt of client {row.client.hex()} is not valid")
    return row
