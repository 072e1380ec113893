"""Where a small record waits in the node's log, and the names of the log's files."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import NewType

__all__ = ["LOG_GLOB", "LogPlace", "Waiting", "log_number", "log_of", "log_path", "log_place", "offset_of"]

LOG_GLOB = "small-*.log"
_OFFSET_BITS = 36  # logs are closed long before 64 GiB

# Where a small record waits: the number of its log, and behind it in 36 bits the offset of its RECORD frame.
LogPlace = NewType("LogPlace", int)


def log_place(log: int, offset: int) -> LogPlace:
    """The place of the record at `offset` of log `log`."""
    return LogPlace(log << _OFFSET_BITS | offset)


def log_of(place: LogPlace) -> int:
    """The number of the log that a record waits in."""
    return place >> _OFFSET_BITS


def offset_of(place: LogPlace) -> int:
    """Where in its log a record waits."""
    return place & (1 << _OFFSET_BITS) - 1


class Waiting:
    """Small records of one series that stand in no shard yet, in order; eight bytes each."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places = array("Q")

    def __len__(self) -> int:
        return len(self._places)

    def append(self, place: LogPlace) -> None:
        """Add the next record."""
        self._places.append(place)

    def first(self, count: int) -> list[LogPlace]:
        """The places of the first `count` records."""
        return self._places[:count].tolist()  # type: ignore[return-value]

    def drop(self, count: int) -> None:
        """Forget the first `count` records."""
        del self._places[:count]


def log_number(path: Path) -> int:
    """The number in a log file's name."""
    return int(path.stem.removeprefix("small-"))


def log_path(directory: Path, number: int) -> Path:
    """The file of log `number`."""
    return directory / f"small-{number:08d}.log"
