"""The ledger of what a run let go: sequences by client and reason, in an append-only file that survives the daemon.

A line is one range: client in hex, reason, first and last sequence. A torn line at the end is cut off. The file is
written anew when most of its lines have joined.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from capd.store.disk.files import make_directory, pwrite_all, rename, write_file
from capd.store.format.ranges import RangeSet
from capd_client.protocol.counter_page import DropReason

__all__ = ["LetGoLedger"]

logger = logging.getLogger(__name__)

_REASONS = {reason.value: reason for reason in DropReason}
_MAX_LINE_NBYTES = 256
# Lines beyond those that are needed.
_MOST_SPARE_LINES = 4096
_MAX_SEQUENCE = (1 << 64) - 1

Ranges = Iterable[tuple[int, int]]


class LetGoLedger:
    """The ledger of one run on one node. Any thread may call it; `of` never waits for the disk."""

    def __init__(self, path: Path) -> None:
        """Read the file of earlier daemons. Raises OSError."""
        self._path = path
        self._known: dict[tuple[bytes, DropReason], RangeSet] = {}
        self._lines, self._next_look = 0, _MOST_SPARE_LINES
        # The first is for the file, and is held while it is written; the second is for what is known.
        self._writing, self._lock = threading.Lock(), threading.Lock()
        try:
            with path.open("rb") as file:
                while line := file.readline(_MAX_LINE_NBYTES):
                    if line.endswith(b"\n") and (found := _parsed(line)) is not None:
                        client, reason, first, last = found
                        self._add(client, reason, [(first, last)])
        except FileNotFoundError:
            return
        self._write_anew()

    def of(self, client: bytes) -> dict[DropReason, RangeSet]:
        """Return the sequences of a client that were let go, by reason."""
        with self._lock:
            return {
                reason: RangeSet(ranges.ranges())
                for (one, reason), ranges in self._known.items()
                if one == client
            }

    def counts(self, client: bytes) -> dict[DropReason, int]:
        """Return how many of a client were let go, by reason."""
        with self._lock:
            return {reason: len(ranges) for (one, reason), ranges in self._known.items() if one == client}

    def add(self, reason: DropReason, gone: Mapping[bytes, RangeSet]) -> None:
        """Note sequences by client. They are in the file when this returns.

        Raises:
            OSError: Nothing is noted. The caller keeps the records, and tries again.
        """
        lines = [_line(client, reason, *one) for client, ranges in gone.items() for one in ranges.ranges()]
        with self._writing:
            self._append(b"".join(lines))
            self._lines += len(lines)
            with self._lock:
                for client, ranges in gone.items():
                    self._add(client, reason, ranges.ranges())
            if self._lines >= self._next_look:
                self._compact()

    def _compact(self) -> None:
        """Write the file anew if that saves most of it. A failure costs nothing but space."""
        with self._lock:
            needed = sum(len(ranges.ranges()) for ranges in self._known.values())
        if self._lines > 2 * needed + _MOST_SPARE_LINES:
            try:
                self._write_anew()
            except OSError as error:
                logger.warning("[window] %s cannot be made smaller: %s", self._path, error)
        self._next_look = self._lines + _MOST_SPARE_LINES

    def _append(self, payload: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self._path, flags, 0o600)
        except FileNotFoundError:
            make_directory(self._path.parent)
            fd = os.open(self._path, flags, 0o600)
        try:
            end = os.fstat(fd).st_size
            try:
                pwrite_all(fd, [payload], end)
            except OSError:
                # Otherwise the next line would continue a part of this one.
                os.ftruncate(fd, end)
                raise
        finally:
            os.close(fd)

    def _write_anew(self) -> None:
        lines = [
            _line(client, reason, first, last)
            for (client, reason), ranges in self._known.items()
            for first, last in ranges.ranges()
        ]
        self._lines = len(lines)
        if lines:
            spare = self._path.with_suffix(".new")
            write_file(spare, b"".join(lines))
            rename(spare, self._path)

    def _add(self, client: bytes, reason: DropReason, ranges: Ranges) -> None:
        known = self._known.setdefault((client, reason), RangeSet())
        for first, last in ranges:
            known.add_range(first, last)


def _line(client: bytes, reason: DropReason, first: int, last: int) -> bytes:
    return f"{client.hex()} {reason.value} {first} {last}\n".encode()


def _parsed(line: bytes) -> tuple[bytes, DropReason, int, int] | None:
    try:
        client, reason, first, last = line.decode().split()
        found = bytes.fromhex(client), _REASONS[reason], int(first), int(last)
    except (ValueError, KeyError):
        return None
    return found if len(found[0]) == 16 and 0 <= found[2] <= found[3] <= _MAX_SEQUENCE else None
