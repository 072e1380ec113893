"""Finds the records in a node's spool (open shards and small logs) by their captures. Changes nothing."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from capd.errors import DamagedRecord
from capd.store.disk.layout import PARTIAL_GLOB, by_digest, named
from capd.store.format.codecs import chain_for
from capd.store.format.dtypes import stored_shape
from capd.store.format.encode import as_array
from capd.store.format.frames import UNKNOWN_CLIENT, FileHeader, RecordRow, SeriesHeader
from capd.store.format.log_places import LOG_GLOB, offset_of
from capd.store.recover.salvage import Salvaged, ShardSource
from capd.store.scan.survey import log_if_readable, scan_if_readable
from capd.store.shards.small_log import read_small

__all__ = ["Capture", "Elsewhere", "SpoolCopies"]

logger = logging.getLogger(__name__)

# Client and sequence.
Capture = tuple[bytes, int]


class _Copy(NamedTuple):
    """A record in a shard (at: its number there) or a log (shard -1; at: the offset of its RECORD frame).

    number: the record's number in its series. series: the path of the series, "" if the log lost its SERIES frame.
    """

    path: Path
    series: str
    shard: int
    at: int
    number: int
    row: RecordRow


class Elsewhere(NamedTuple):
    """A record of the spool. taken: its elements, None if no copy is intact."""

    number: int
    row: RecordRow
    taken: Salvaged | None


class SpoolCopies:
    """The intact records in a spool, except those whose client and sequence are lost.

    A context manager. headers: the headers of all series found, by path.
    """

    def __init__(
        self, spool: Path, headers: Mapping[str, SeriesHeader], owns: Callable[[FileHeader], bool]
    ) -> None:
        """Read the journals of all files in the spool.

        Args:
            spool: The directory.
            headers: The headers of series by path, for shards whose HEADER is lost.
            owns: Returns whether a file belongs to this run and node.

        Raises:
            OSError: The directory cannot be listed.
        """
        self.headers: dict[str, SeriesHeader] = {}
        self._owns = owns
        self._copies: dict[Capture, list[_Copy]] = {}
        # By series, in order.
        self._captures: dict[str, dict[Capture, None]] = {}
        # The shard that was read last.
        self._source: ShardSource | None = None
        digests = by_digest(headers.values())
        for path in _files(spool, PARTIAL_GLOB):
            self._add_shard(path, digests)
        for path in _files(spool, LOG_GLOB):
            self._add_log(path)

    def __enter__(self) -> SpoolCopies:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def take(self, header: SeriesHeader, row: RecordRow) -> tuple[RecordRow, Salvaged] | None:
        """Return the record of this series that `row` names, with its elements; None if no copy is intact."""
        found = self._take(header, (row.client, row.sequence))
        return found if found is not None and found[0].shape == row.shape else None

    def others(self, header: SeriesHeader, seen: Collection[Capture]) -> Iterator[Elsewhere]:
        """Yield the records of this series that are not among the captures `seen`."""
        for capture in self._captures.get(header.path, ()):
            if capture not in seen:
                found = self._take(header, capture)
                first = self._copies[capture][0]
                yield Elsewhere(
                    first.number,
                    first.row if found is None else found[0],
                    None if found is None else found[1],
                )

    def without_series(self, accounted: Collection[Capture]) -> list[str]:
        """Name the logs with records whose series is lost, except those of `accounted`, and count these records."""
        orphans: Counter[Path] = Counter()
        for capture, copies in self._copies.items():
            if capture not in accounted and not any(copy.series for copy in copies):
                orphans[copies[0].path] += 1
        return [f"{path}: {count} records whose series is lost" for path, count in orphans.items()]

    def _add_shard(self, path: Path, digests: Mapping[str, SeriesHeader]) -> None:
        scanned = scan_if_readable(path, named(path, digests))
        if scanned is None or (scanned.file is not None and not self._owns(scanned.file)):
            return
        for number, row in scanned.rows.items():
            copy = _Copy(path, scanned.header.path, scanned.shard, number, number, row)
            self._add(scanned.header, copy)

    def _add_log(self, path: Path) -> None:
        log = log_if_readable(path)
        if log is None or (log.file is not None and not self._owns(log.file)):
            return
        for logged in log.records:
            # Without its SERIES frame, only the capture identifies the record.
            series = "" if logged.header is None else logged.header.path
            at = offset_of(logged.place)
            self._add(logged.header, _Copy(path, series, -1, at, logged.record, logged.row))

    def _add(self, header: SeriesHeader | None, copy: _Copy) -> None:
        capture = (copy.row.client, copy.row.sequence)
        if copy.row.client == UNKNOWN_CLIENT:
            return
        self._copies.setdefault(capture, []).append(copy)
        if header is not None:
            self.headers.setdefault(header.path, header)
            self._captures.setdefault(header.path, {})[capture] = None

    def _take(self, header: SeriesHeader, capture: Capture) -> tuple[RecordRow, Salvaged] | None:
        for copy in self._copies.get(capture, ()):
            if copy.series in ("", header.path) and header.geometry.fits(
                stored_shape(header.dtype, copy.row.shape)
            ):
                try:
                    taken = self._read(copy, header)
                except OSError as error:
                    logger.warning("%s cannot be read: %s", copy.path, error)
                    continue
                if taken is not None:
                    return copy.row, taken
        return None

    def _read(self, copy: _Copy, header: SeriesHeader) -> Salvaged | None:
        if copy.shard < 0:
            return _from_log(copy, header)
        if self._source is None or self._source.path != copy.path:
            self._close()
            self._source = ShardSource(copy.path, header, copy.shard)
        return self._source.take(copy.at, copy.row)

    def _close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None


def _files(directory: Path, pattern: str) -> list[Path]:
    return [path for path in sorted(directory.glob(pattern)) if path.is_file() and not path.is_symlink()]


def _from_log(copy: _Copy, header: SeriesHeader) -> Salvaged | None:
    fd = os.open(copy.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        raw, _, _ = read_small(fd, copy.at)
        shape = stored_shape(header.dtype, copy.row.shape)
        return as_array(raw, chain_for(header.codec, header.dtype).stored, shape)
    except (DamagedRecord, ValueError):
        return None
    finally:
        os.close(fd)
