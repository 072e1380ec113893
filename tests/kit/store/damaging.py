"""Damages the files of a store on purpose, and says what of it is left."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from capd.store.format.frames import FRAME_NBYTES, Frame, FrameKind, decode_row, encode_row, walk
from capd_client.protocol.key import Moment
from tests.kit.store.reading import Held
from tests.kit.store.writing import Writer


def image(writer: Writer, target: Path) -> Path:
    """The run as a kill at this moment would leave it, below `target`; returns the run.

    The thread that writes the files copies them, so that none is changed meanwhile.
    """
    copy = target / writer.run.name
    writer.pipeline.post(writer.run_id, lambda store: shutil.copytree(writer.run, copy)).result(timeout=60)
    return copy


def spool(run: Path, pattern: str) -> Path:
    """The one file of the spool that matches."""
    [path] = (run / ".capd" / "node=n0" / "spool").glob(pattern)
    return path


def quarantined(run: Path) -> list[str]:
    """Names in the node's quarantine."""
    place = run / ".capd" / "node=n0" / "quarantine"
    return sorted(path.name for path in place.iterdir()) if place.is_dir() else []


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def frames(path: Path, kind: FrameKind) -> list[Frame]:
    """The frames of one kind in a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return [frame for frame in walk(fd, 0, path.stat().st_size) if frame.kind is kind]
    finally:
        os.close(fd)


def head(frame: Frame) -> int:
    """An offset inside a frame's 48 header bytes."""
    return frame.offset - FRAME_NBYTES + 20


def inside(frame: Frame) -> int:
    """An offset inside a frame's payload."""
    return frame.offset + frame.nbytes // 2


def without(held: Held, lost: Callable[[str, Moment], bool]) -> Held:
    """What is held, without the records of which lost(tensor name, moment) is true; series keep at least one."""
    kept: Held = {}
    for (key, dtype), records in held.items():
        rest = [(m, bits) for m, bits in records if not lost(key.tensor_name, m)]
        if rest:
            kept[(key, dtype)] = rest
    return kept


def edit_catalog(catalog: Path, statement: str) -> None:
    """Run an SQL statement, which may look into rows of `records` and change them.

    field(body, 'shape') and field(body, 'moment.iteration') give the JSON of a field, changed(body, field, JSON) the
    body with another value in it.
    """
    database = sqlite3.connect(catalog)
    database.create_function("field", 2, _field)
    database.create_function("changed", 3, _changed)
    with database:
        database.execute(statement)
    database.close()


def _field(body: bytes, path: str) -> str:
    found: Any = decode_row(body)
    for name in path.split("."):
        found = getattr(found, name)
    return msgspec.json.encode(found).decode()


def _changed(body: bytes, path: str, value: str | int) -> bytes:
    row = decode_row(body)
    *outer, name = path.split(".")
    owner = getattr(row, outer[0]) if outer else row
    new = msgspec.json.decode(str(value))
    owner = msgspec.structs.replace(owner, **{name: new.encode() if name == "client" else new})
    return encode_row(msgspec.structs.replace(row, **{outer[0]: owner}) if outer else owner)
