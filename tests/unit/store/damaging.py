"""Damages the files of a store on purpose, and says what of it is left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from capd.store.frames import FRAME_NBYTES, Frame, Kind, walk
from capd_client.key import Moment
from tests.unit.store.reading import Held
from tests.unit.store.writing import Writer


def image(writer: Writer, target: Path) -> Path:
    """The run as a kill at this moment would leave it, below `target`; returns the run."""
    writer.pipeline.post(writer.run_id, lambda store: None).result(timeout=30)  # nothing is half-way
    shutil.copytree(writer.run, target / writer.run.name)
    return target / writer.run.name


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


def frames(path: Path, kind: Kind) -> list[Frame]:
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
