"""The place of a small record in the node's log, and the names of the log's files."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import NewType

__all__ = ["LOG_GLOB", "LogPlace", "Waiting", "log_number", "log_of", "log_path", "log_place", "offset_of"]

LOG_GLOB = "small-*.log"
# Logs are closed long before 64 GiB.
_OFFSET_BITS = 36

# The place of a pending small record: the number of its log, followed by the offset of its RECORD frame in 36 bits.
LogPlace = NewType("LogPlace", int)


def log_place(log: int, offset: int) -> LogPlace:
    """Return the place of the record at `offset` of log `log`."""
    return LogPlace(log << _OFFSET_BITS | offset)


def log_of(place: LogPlace) -> int:
    """Return the number of the log that holds a record."""
    return place >> _OFFSET_BITS


def offset_of(place: LogPlace) -> int:
    """Return the offset of a record in its log."""
    return place & (1 << _OFFSET_BITS) - 1


class Waiting:
    """The small records of one series that are in no shard yet, in order. Each takes eight bytes."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places = array("Q")

    def __len__(self) -> int:
        return len(self._places)

    def append(self, place: LogPlace) -> None:
        """Add the next record."""
        self._places.append(place)

    def first(self, count: int) -> list[LogPlace]:
        """Return the places of the first `count` records."""
        return self._places[:count].tolist()  # type: ignore[return-value]

    def drop(self, count: int) -> None:
        """Forget the first `count` records."""
        del self._places[:count]


def log_number(path: Path) -> int:
    """Return the number in a log file's name."""
    return int(path.stem.removeprefix("small-"))


def log_path(directory: Path, number: int) -> Path:
    """Return the file of log `number`."""
    return directory / f"small-{number:08d}.log"
