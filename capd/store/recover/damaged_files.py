"""Damaged files of a spool: moved to the quarantine, or rewritten without their lost records, with dense numbers.

A rewritten file is copied to the quarantine first. Then the new file takes its name. A kill in between leaves the
damaged file in its place, and the next start rewrites it again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec

from capd.errors import DamagedRecord
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import (
    copy_range,
    make_directory,
    new_file,
    remove_tree,
    rename,
    sync_paths,
    unlink,
)
from capd.store.disk.layout import shard_path
from capd.store.format.frames import RecordRow, SeriesHeader
from capd.store.format.log_places import LogPlace, log_number, log_place, offset_of
from capd.store.recover.salvage import Salvaged, ShardSource, write_records
from capd.store.recover.state import Recovery
from capd.store.shards.small_log import Small, SmallLog, read_small
from capd.store.shards.writer import ShardWriter

__all__ = ["LoggedSmall", "copy_aside", "is_the_files_fault", "rewrite_log", "rewrite_partial", "set_aside"]

logger = logging.getLogger(__name__)

_NOT_THE_FILES_FAULT = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EACCES}
)
_READ_NBYTES = 1 << 20


class LoggedSmall(NamedTuple):
    """A small record that is kept, with its number. place: its position in the damaged log."""

    header: SeriesHeader
    number: int
    row: RecordRow
    place: LogPlace


def is_the_files_fault(error: OSError, path: Path) -> bool:
    """Return whether the file itself caused `error`: it cannot be read to its end.

    Any other error is temporary or needs the user. Acknowledged records must not go to the quarantine because of it.
    """
    if error.errno in _NOT_THE_FILES_FAULT:
        return False
    try:
        with path.open("rb", buffering=0) as file:
            while file.read(_READ_NBYTES):
                pass
    except OSError:
        return True
    return False


def set_aside(path: Path, quarantine: Path, reason: str) -> None:
    """Move an unusable file or directory to the quarantine, under a free name."""
    target = next(place for place in _places(path, quarantine) if not os.path.lexists(place))
    logger.warning("%s moved to %s: %s", path, target, reason)
    rename(path, target)


def copy_aside(path: Path, quarantine: Path) -> None:
    """Copy a damaged file to the quarantine, unless a copy of the same size is already there."""
    nbytes = path.stat().st_size
    for target in _places(path, quarantine):
        if not target.exists():
            break
        if target.stat().st_size == nbytes:
            return
    temporary = path.with_suffix(".tmp")
    new_file(temporary, [])
    with path.open("rb", buffering=0) as source, temporary.open("r+b", buffering=0) as copy:
        copy_range(source.fileno(), copy.fileno(), nbytes)
    rename(temporary, target)


def _places(path: Path, quarantine: Path) -> Iterator[Path]:
    """Yield the names that a file may get in the quarantine."""
    make_directory(quarantine)
    yield quarantine / path.name
    yield from (quarantine / f"{path.name}.{number}" for number in count(1))


def rewrite_partial(state: Recovery, path: Path, header: SeriesHeader, shard: int) -> list[int]:
    """Rewrite a `.partial` without the records whose COMMIT is lost. Published records keep their numbers.

    Returns:
        The numbers of the lost records, up to the newest record of the file.

    Raises:
        OSError: A file cannot be read or written.
        DamagedRecord: A published record is damaged both here and in the sealed shard.
    """
    series = state.series_of(header)
    first, sealed = shard * header.geometry.shard_records, series.row.sealed
    copy_aside(path, state.quarantine)
    temporary = path.with_suffix(".tmp")
    unlink(temporary, missing_ok=True)
    lost: list[int] = []
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(ShardSource(path, header, shard))]
        if sealed > first and (final := shard_path(state.layout.run, header, shard)).is_file():
            sources.append(stack.enter_context(ShardSource(final, header, shard)))
        rows = dict(state.catalog.rows(series.row.id, first, sealed))
        for source in reversed(sources):
            rows |= source.scanned.rows
        numbers = range(first, sources[0].scanned.newest + 1)
        file_header = msgspec.structs.replace(state.file_header, series=header, shard=shard)
        writer = ShardWriter.create(temporary, state.files, file_header)
        write_records(header, first, _sound(numbers, rows, sources, sealed, lost), writer)
    state.files.forget(temporary)
    _take_place(temporary, path)
    return lost


def _sound(
    numbers: Iterable[int],
    rows: Mapping[int, RecordRow],
    sources: Sequence[ShardSource],
    sealed: int,
    lost: list[int],
) -> Iterator[tuple[RecordRow, Salvaged]]:
    for number in numbers:
        row = rows.get(number)
        taken = None
        if row is not None:
            # The sealed shard's last chunk may lack later records that share the chunk.
            holders = sources if number < sealed else sources[:1]
            taken = next((t for source in holders if (t := source.take(number, row)) is not None), None)
        if row is not None and taken is not None:
            yield row, taken
        elif number < sealed:
            raise DamagedRecord(
                f"record {number} is published and damaged; `capd verify RUN --repair -o NEW` makes a run without it"
            )
        else:
            lost.append(number)


def rewrite_log(state: Recovery, path: Path, kept: Iterable[LoggedSmall]) -> list[LogPlace]:
    """Rewrite a small log with the records to keep, under their numbers. Return their new places.

    Raises:
        OSError: A file cannot be read or written.
        DamagedRecord: A record to keep is damaged.
    """
    scratch = path.with_suffix(".tmp")
    remove_tree(scratch)
    make_directory(scratch)
    log = SmallLog(scratch, state.file_header, path.stat().st_size * 2, state.files)
    places: list[LogPlace] = []
    with path.open("rb", buffering=0) as source:
        for header, number, row, place in kept:
            raw, _, _ = read_small(source.fileno(), offset_of(place))
            [new] = log.append([(header, number, Small.of(row, raw))])
            places.append(log_place(log_number(path), offset_of(new)))
    state.files.forget(log.path(0))
    _take_place(log.path(0), path)
    remove_tree(scratch)
    return places


def _take_place(temporary: Path, path: Path) -> None:
    """Replace the damaged file by the new one, durably."""
    sync_paths([temporary], path.parent)
    failpoint("recover.before_rename")
    rename(temporary, path)
    sync_paths([path.parent], path.parent)
