"""The journals of a store, decoded from docs/format.md alone: frames, COMMITs, small logs. Imports nothing of capd."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import msgspec

__all__ = [
    "CHUNK", "COMMIT", "EMPTY", "FRAME", "HEADER", "RECORD", "SERIES", "Row", "Shard", "digest", "frames",
    "read_log", "read_shard", "rows_of",
]  # fmt: skip

FRAME = struct.Struct("<4sBBHIIQQQII")
HEADER, CHUNK, COMMIT, SERIES, RECORD = range(1, 6)
EMPTY = 2**64 - 1


class Row(NamedTuple):
    """One record of a COMMIT."""

    client: bytes
    sequence: int
    shape: tuple[int, ...]
    iteration: int


class Shard(NamedTuple):
    """The journal of a shard file up to its last sound COMMIT."""

    path: str
    number: int
    rows: dict[int, Row]
    index: dict[int, tuple[int, int]]
    payload: bytes


def frames(payload: bytes) -> Iterator[tuple[int, int, bytes, int]]:
    """(kind, ordinal, body, offset of the body) of every sound frame from the start on."""
    at = 0
    while at + FRAME.size <= len(payload):
        head = payload[at : at + FRAME.size]
        magic, version, kind, _, nbytes, ordinal, _, _, _, crc, head_crc = FRAME.unpack(head)
        body = payload[at + FRAME.size : at + FRAME.size + nbytes]
        if (
            magic != b"CPDF"
            or version != 1
            or google_crc32c.value(head[:-4]) != head_crc
            or len(body) < nbytes
        ):
            return
        if google_crc32c.value(body[:-4] if kind == CHUNK else body) != crc:
            return
        yield kind, ordinal, body, at + FRAME.size
        at += FRAME.size + nbytes


def rows_of(commit: list[Any]) -> dict[int, Row]:
    """The rows of a decoded COMMIT by record number."""
    first, rows = commit[0], commit[1]
    return {n: Row(r[0], r[1], tuple(r[2]), (r[4] or [0])[0]) for n, r in enumerate(rows, first)}


def read_shard(file: Path) -> Shard | None:
    """The journal of a shard or `.partial`; None where nothing was committed yet."""
    payload = file.read_bytes()
    found: Shard | None = None
    end = 0
    for kind, _, body, offset in frames(payload):
        if kind == HEADER:
            _, _, _, series, number = msgspec.msgpack.decode(body)
            found = Shard(series[0], number, {}, {}, b"")
        elif kind == COMMIT and found is not None:
            commit = msgspec.msgpack.decode(body)
            found.rows.update(rows_of(commit))
            found.index.update({slot: (at, nbytes) for slot, at, nbytes in commit[2]})
            end = offset + len(body)
    return None if found is None or not found.rows else found._replace(payload=payload[:end])


def read_log(file: Path) -> Iterator[tuple[str, int, Row, bytes]]:
    """(series path, record number, row, raw bytes) of every committed record of a small log."""
    series: dict[int, str] = {}
    raw = b""
    for kind, ordinal, body, _ in frames(file.read_bytes()):
        if kind == SERIES:
            series[ordinal] = msgspec.msgpack.decode(body)[0]
        elif kind == RECORD:
            raw = body
        elif kind == COMMIT:
            for number, row in rows_of(msgspec.msgpack.decode(body)).items():
                yield series[ordinal], number, row, raw


def digest(shape: tuple[int, ...], payload: bytes) -> str:
    """As in the log of what was offered."""
    return hashlib.blake2b(payload, digest_size=16, key=repr(tuple(shape)).encode()[:64]).hexdigest()
