"""Damage of known cost to the files of a `Site`: each function spoils one record of the rank, and says which."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from tests.fault.kit.damage import CLASSES, flip
from tests.fault.kit.journals import CHUNK, COMMIT, RECORD, frames, rows_of

__all__ = ["SPOIL"]


def _medium(run: Path, kind: str) -> Path:
    """The `.partial` or shard of the series of one chunk per record."""
    found = (
        file for file in run.glob(CLASSES[kind]) if file.is_file() and b".medium" in file.read_bytes()[:500]
    )
    return min(found)


def _iterations(file: Path) -> list[int]:
    """Of a journal's records, in file order."""
    bodies = [body for kind, _, body, _ in frames(file.read_bytes()) if kind == COMMIT]
    return [row.iteration for body in bodies for row in rows_of(msgspec.msgpack.decode(body)).values()]


def _flip_in(file: Path, kind: int, number: int) -> None:
    """Flip a bit in the middle of the body of the frame `number` of a kind."""
    places = [(at, len(body)) for found, _, body, at in frames(file.read_bytes()) if found == kind]
    at, nbytes = places[number]
    flip(file, 8 * (at + nbytes // 2))


def _partial(run: Path, rank: int) -> list[str]:
    """A COMMIT in the middle."""
    file = _medium(run, "partial")
    iteration = _iterations(file)[1]
    _flip_in(file, COMMIT, 1)
    return [str((rank, "medium", iteration))]


def _log(run: Path, rank: int) -> list[str]:
    """The bytes of a small record."""
    [file] = run.glob(CLASSES["log"])
    iteration = _iterations(file)[3]
    _flip_in(file, RECORD, 3)
    return [str((rank, "small", iteration))]


def _shard(run: Path, rank: int) -> list[str]:
    """A chunk of a sealed record."""
    file = _medium(run, "shard")
    iteration = _iterations(file)[1]
    _flip_in(file, CHUNK, 1)
    return [str((rank, "medium", iteration))]


def _catalog(run: Path, rank: int) -> list[str]:
    """The catalog, which is derived from the rest."""
    [file] = run.glob(CLASSES["catalog"])
    os.truncate(file, file.stat().st_size // 2)
    return []


SPOIL: dict[str, Callable[[Path, int], list[str]]] = {
    "partial": _partial,
    "log": _log,
    "shard": _shard,
    "catalog": _catalog,
}
"""(run, rank) → what the checker's list `lost` will hold, by kind of file."""
