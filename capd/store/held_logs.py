"""Keeps small logs within reach while a node is repaired: a record that its shard lost may still stand in one.

Recovery and sealing let a log go once shards hold its records, whether or not those shards turn out to be damaged.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from capd.errors import DamagedRecord
from capd.store.codecs import chain_for
from capd.store.encode import as_array
from capd.store.files import copy_range, link, make_directory, new_file, remove_tree, sync_paths
from capd.store.frames import RecordRow, SeriesHeader
from capd.store.mend import is_the_files_fault
from capd.store.scan import read_log
from capd.store.small import LOG_GLOB, log_path, offset_of, read_small
from capd.store.survey import UNKNOWN_CLIENT
from capd_client.key import Moment

__all__ = ["HeldLogs"]

logger = logging.getLogger(__name__)

_NO_LINKS = frozenset({errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS})
Identity = tuple[bytes, int] | tuple[Moment, tuple[int, ...]]


class _Held(NamedTuple):
    path: Path
    offset: int
    header: SeriesHeader
    row: RecordRow


class HeldLogs:
    """The logs of a spool, under further names in a directory of their own until `release`.

    A repair that is interrupted leaves them there, and the next one adds to them.
    """

    def __init__(self, spool: Path, directory: Path) -> None:
        """Raises OSError; then some logs may be held, and nothing else has changed."""
        self._directory = directory
        logs = [path for path in sorted(spool.glob(LOG_GLOB)) if path.is_file() and not path.is_symlink()]
        if not logs:
            return
        make_directory(directory)
        held = list(directory.glob(LOG_GLOB))
        number = len(held)
        for path in logs:
            if any(path.samefile(other) for other in held):
                continue
            while os.path.lexists(log_path(directory, number)):
                number += 1
            _link_or_copy(path, log_path(directory, number))
        sync_paths([*directory.glob(LOG_GLOB), directory, directory.parent], directory)

    def records(self, series: Collection[str]) -> HeldRecords:
        """What they hold soundly of the series with these paths. Raises OSError."""
        return HeldRecords(self._directory, series)

    def release(self) -> None:
        """Let them go."""
        remove_tree(self._directory)


class HeldRecords:
    """Records of some series in held logs."""

    def __init__(self, directory: Path, series: Collection[str]) -> None:
        # By series and capture, and by moment and shape too where only one capture has them.
        self._held: dict[tuple[str, Identity], _Held | None] = {}
        for path in sorted(directory.glob(LOG_GLOB)):
            try:
                log = read_log(path, check=True)
            except OSError as error:
                if not is_the_files_fault(error, path):
                    raise
                logger.warning("%s cannot be read: %s", path, error)
                continue
            for logged in log.records if log is not None else ():
                if logged.is_sound and logged.header is not None and logged.header.path in series:
                    self._add(_Held(path, offset_of(logged.place), logged.header, logged.row))

    def _add(self, held: _Held) -> None:
        row, series = held.row, held.header.path
        self._held[series, (row.client, row.sequence)] = held
        other = self._held.setdefault((series, (row.moment, row.shape)), held)
        if other is not None and (other.row.client, other.row.sequence) != (row.client, row.sequence):
            self._held[series, (row.moment, row.shape)] = None

    def take(self, header: SeriesHeader, row: RecordRow) -> tuple[RecordRow, NDArray[Any]] | None:
        """The record that `row` names, by its capture, or where that is lost by moment and shape, with its elements.

        None where no log holds it. Raises OSError.
        """
        by: Identity = (row.client, row.sequence)
        if row.client == UNKNOWN_CLIENT:
            by = (row.moment, row.shape)
        held = self._held.get((header.path, by))
        if held is None or held.header.dtype != header.dtype or not header.geometry.fits(held.row.shape):
            return None
        fd = os.open(held.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            raw, _, _ = read_small(fd, held.offset)
            stored = chain_for(header.codec, header.dtype).stored
            return held.row, as_array(raw, stored, held.row.shape)
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
        new_file(target, [])
        read, write = os.open(source, os.O_RDONLY | os.O_CLOEXEC), os.open(target, os.O_RDWR | os.O_CLOEXEC)
        try:
            copy_range(read, write, os.fstat(read).st_size)
        finally:
            os.close(read)
            os.close(write)
