"""Finds the copies of records that stand in a spool, in open shards and small logs; known by their captures.

Recovery and sealing let go of these files once sealed shards hold their records, whether or not those shards turn out
to be damaged, and damage can keep an open shard from going on at all. A repair holds them under further names first.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from capd.errors import DamagedRecord
from capd.store.codecs import chain_for
from capd.store.dtypes import stored_shape
from capd.store.encode import as_array
from capd.store.files import link, make_directory, remove_tree, sync_paths
from capd.store.frames import UNKNOWN_CLIENT, FileHeader, RecordRow, SeriesHeader
from capd.store.mend import copy_aside, is_the_files_fault
from capd.store.partials import by_digest, named
from capd.store.salvage import Salvaged, ShardSource
from capd.store.scan import ScannedLog, read_log
from capd.store.small import LOG_GLOB, offset_of, read_small
from capd.store.survey import scan_if_readable

__all__ = ["Capture", "HeldSpool", "SpoolCopies"]

logger = logging.getLogger(__name__)

PARTIAL_GLOB = "*.partial"
_NO_LINKS = frozenset({errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS})
Capture = tuple[bytes, int]  # client and sequence


class _Copy(NamedTuple):
    """A record in a shard (at: its number there) or a log (shard -1; at: offset of its RECORD frame).

    series: path of its series, "" where a log lost the frame that says so.
    """

    path: Path
    series: str
    shard: int
    at: int
    row: RecordRow


class SpoolCopies:
    """Records that stand soundly in the spool files of some directories, but for those whose capture is lost.

    A context manager. headers: of all series found, by path. logged: captures in the logs, sound or not.
    """

    def __init__(
        self,
        directories: Iterable[Path],
        headers: Mapping[str, SeriesHeader],
        owns: Callable[[FileHeader], bool],
    ) -> None:
        """headers: by path, for shards whose HEADER is lost. owns: whether a file is of this run and node.

        Raises OSError.
        """
        self.headers: dict[str, SeriesHeader] = {}
        self.logged: set[Capture] = set()
        self._copies: dict[Capture, list[_Copy]] = {}
        self._captures: dict[str, dict[Capture, None]] = {}  # of each series, in order
        self._source: ShardSource | None = None
        digests = by_digest(headers.values())
        for directory in directories:
            for path in _files(directory, PARTIAL_GLOB):
                self._add_shard(path, digests, owns)
            for path in _files(directory, LOG_GLOB):
                self._add_log(path, owns)

    def __enter__(self) -> SpoolCopies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def missing(self, known: Iterable[Capture]) -> set[str]:
        """Paths of the series with sound records that are not among the `known`. Raises OSError."""
        unknown = set(self._copies).difference(known)
        return {
            path
            for path, captures in self._captures.items()
            if any(c in unknown and self._take(self.headers[path], c) is not None for c in captures)
        }

    def take(self, header: SeriesHeader, row: RecordRow) -> tuple[RecordRow, Salvaged] | None:
        """The record of this series that `row` names, with its elements; None where it is nowhere sound.

        Raises OSError.
        """
        found = self._take(header, (row.client, row.sequence))
        return found if found is not None and found[0].shape == row.shape else None

    def others(self, header: SeriesHeader, seen: Collection[Capture]) -> Iterator[tuple[RecordRow, Salvaged]]:
        """The records of this series that are not among the captures `seen`. Raises OSError."""
        for capture in self._captures.get(header.path, ()):
            if capture not in seen and (found := self._take(header, capture)) is not None:
                yield found

    def _add_shard(
        self, path: Path, digests: Mapping[str, SeriesHeader], owns: Callable[[FileHeader], bool]
    ) -> None:
        scanned = scan_if_readable(path, named(path, digests))
        if scanned is None or (scanned.file is not None and not owns(scanned.file)):
            return
        for at, row in scanned.rows.items():
            self._add(scanned.header, _Copy(path, scanned.header.path, scanned.shard, at, row))

    def _add_log(self, path: Path, owns: Callable[[FileHeader], bool]) -> None:
        log = _log_if_readable(path)
        if log is None or (log.file is not None and not owns(log.file)):
            return
        for logged in log.records:
            self.logged.add((logged.row.client, logged.row.sequence))
            if logged.is_sound:  # without its SERIES frame the capture alone says whose it is
                series = "" if logged.header is None else logged.header.path
                self._add(logged.header, _Copy(path, series, -1, offset_of(logged.place), logged.row))

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
            if copy.series not in ("", header.path) or not header.geometry.fits(
                stored_shape(header.dtype, copy.row.shape)
            ):
                continue
            try:
                taken = self._read(copy, header)
            except OSError as error:
                if not is_the_files_fault(error, copy.path):
                    raise
                logger.warning("%s cannot be read: %s", copy.path, error)
                continue
            if taken is not None:
                return copy.row, taken
        return None

    def _read(self, copy: _Copy, header: SeriesHeader) -> Salvaged | None:
        if copy.shard < 0:
            return _from_log(copy, header)
        return self._shard(copy, header).take(copy.at, copy.row)

    def _shard(self, copy: _Copy, header: SeriesHeader) -> ShardSource:
        if self._source is None or self._source.path != copy.path:
            self._close()
            self._source = ShardSource(copy.path, header, copy.shard)
        return self._source

    def _close(self) -> None:
        if self._source is not None:
            self._source.__exit__(None, None, None)
            self._source = None


class HeldSpool:
    """The files of a spool, under further names in a directory of their own until `release`.

    A repair that is interrupted leaves them there, and the next one holds what there is then beside them. Where the
    file system has no hard links, small logs are copied, and open shards are not held.
    """

    def __init__(self, spool: Path, directory: Path) -> None:
        """Raises OSError; then some files may be held, and nothing else has changed."""
        self._directory = directory
        files = [*_files(spool, PARTIAL_GLOB), *_files(spool, LOG_GLOB)]
        if not files:
            return
        number = max((int(path.name) for path in self.directories if path.name.isdecimal()), default=-1) + 1
        here = directory / str(number)
        make_directory(here)
        for path in files:
            _link_or_copy(path, here / path.name)
        sync_paths([*here.iterdir(), here, directory, directory.parent], directory)

    @property
    def directories(self) -> list[Path]:
        """Where files are held: one directory for each repair that was begun."""
        return sorted(self._directory.iterdir()) if self._directory.is_dir() else []

    def release(self) -> None:
        """Let them go."""
        remove_tree(self._directory)


def _files(directory: Path, pattern: str) -> list[Path]:
    return [path for path in sorted(directory.glob(pattern)) if path.is_file() and not path.is_symlink()]


def _log_if_readable(path: Path) -> ScannedLog | None:
    try:
        return read_log(path, check=True)
    except OSError as error:
        if not is_the_files_fault(error, path):
            raise
        logger.warning("%s cannot be read: %s", path, error)
        return None


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


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if source.match(LOG_GLOB):
            copy_aside(source, target.parent)
