"""Repairs a damaged `.partial` or small log: drops the lost records and numbers the others densely.

The damaged file is copied to the quarantine first. Then the repaired file takes its name. A kill in between leaves
the damaged file in its place, and the next start repeats the repair.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from capd.errors import DamagedRecord
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import copy_range, make_directory, new_file, pwrite_all, rename, sync_paths, unlink
from capd.store.disk.layout import shard_path
from capd.store.disk.open_files import OpenFiles
from capd.store.format.frames import (
    UNKNOWN_CLIENT,
    FileHeader,
    FrameKind,
    RecordRow,
    SeriesHeader,
    encode_commit,
    frame,
)
from capd.store.format.log_places import LogPlace, log_number, log_place, offset_of
from capd.store.recover.salvage import Salvaged, ShardSource, write_records
from capd.store.shards.small_log import read_small
from capd.store.shards.writer import ShardWriter

__all__ = ["KeptSmall", "copy_aside", "is_the_files_fault", "mend_log", "mend_partial", "set_aside"]

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_NOT_THE_FILES_FAULT = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EACCES}
)
_READ_NBYTES = 1 << 20


class KeptSmall(NamedTuple):
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
    make_directory(quarantine)
    target, count = quarantine / path.name, 0
    while os.path.lexists(target):
        count += 1
        target = quarantine / f"{path.name}.{count}"
    logger.warning("%s moved to %s: %s", path, target, reason)
    rename(path, target)


def copy_aside(path: Path, quarantine: Path) -> None:
    """Copy a damaged file to the quarantine, unless a copy of the same size is already there."""
    make_directory(quarantine)
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(source).st_size
        target, count = quarantine / path.name, 0
        while target.exists():
            if target.stat().st_size == size:
                return
            count += 1
            target = quarantine / f"{path.name}.{count}"
        temporary = path.with_suffix(".tmp")
        new_file(temporary, [])
        copy = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
        try:
            copy_range(source, copy, size)
        finally:
            os.close(copy)
        rename(temporary, target)
    finally:
        os.close(source)


def mend_partial(
    path: Path,
    run: Path,
    file_header: FileHeader,
    published: Mapping[int, RecordRow],
    sealed: int,
    files: OpenFiles,
    quarantine: Path,
) -> list[int]:
    """Rewrite a `.partial` without the records whose COMMIT is lost.

    Args:
        path: The damaged `.partial`.
        run: The directory of the run.
        file_header: The header of this shard, with its series.
        published: The catalog's rows of the published records, by number.
        sealed: Records below this number are published and keep their numbers.
        files: The open files of the store.
        quarantine: The directory that gets a copy of the damaged file.

    Returns:
        The numbers of the lost records, up to the newest record of the file.

    Raises:
        OSError: A file cannot be read or written.
        DamagedRecord: A published record is damaged both here and in the sealed shard.
    """
    header, number = file_header.series, file_header.shard
    assert header is not None  # noqa: S101 - a shard's header
    first = number * header.geometry.shard_records
    copy_aside(path, quarantine)
    temporary = path.with_suffix(".tmp")
    unlink(temporary, missing_ok=True)
    lost: list[int] = []
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(ShardSource(path, header, number))]
        if sealed > first and (final := shard_path(run, header, number)).is_file():
            sources.append(stack.enter_context(ShardSource(final, header, number)))
        rows = dict(published)
        for source in reversed(sources):
            rows |= source.scanned.rows
        numbers = range(first, sources[0].scanned.newest + 1)
        writer = ShardWriter.create(temporary, files, file_header)
        write_records(header, first, _sound(numbers, rows, sources, sealed, lost), lambda _: writer)
    files.forget(temporary)
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
            taken = next((t for source in holders if (t := _take(source, number, row)) is not None), None)
        if row is not None and taken is not None:
            yield row, taken
        elif number < sealed:
            raise DamagedRecord(
                f"record {number} is published and damaged; `capd verify RUN --repair -o NEW` makes a run without it"
            )
        else:
            lost.append(number)


def _take(source: ShardSource, number: int, row: RecordRow) -> Salvaged | None:
    """Return the record, or None if the source has another capture under its number: one file was renumbered."""
    own = source.scanned.rows.get(number, row)
    named = UNKNOWN_CLIENT not in (own.client, row.client)
    other = named and (own.client, own.sequence) != (row.client, row.sequence)
    return None if other else source.take(number, row)


def mend_log(
    path: Path, file_header: FileHeader, kept: Iterable[KeptSmall], quarantine: Path | None
) -> list[LogPlace]:
    """Rewrite a small log with the records to keep, under their numbers.

    Args:
        path: The log.
        file_header: The header of the new file.
        kept: The records to keep.
        quarantine: The directory that gets a copy of the old file; None for no copy.

    Returns:
        The new places of the records, in the order of `kept`.

    Raises:
        OSError: A file cannot be read or written.
        DamagedRecord: A record to keep is damaged.
    """
    if quarantine is not None:
        copy_aside(path, quarantine)
    temporary = path.with_suffix(".tmp")
    unlink(temporary, missing_ok=True)
    payload = _encode(file_header)
    end = new_file(temporary, [frame(FrameKind.HEADER, payload), payload])
    references: dict[str, int] = {}
    places: list[LogPlace] = []
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    target = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
    try:
        for header, number, row, place in kept:
            raw, _, record = read_small(source, offset_of(place))
            parts: list[bytes] = []
            if header.path not in references:
                references[header.path] = len(references)
                payload = _encode(header)
                parts = [frame(FrameKind.SERIES, payload, ordinal=references[header.path]), payload]
            places.append(log_place(log_number(path), end + sum(map(len, parts))))
            commit = encode_commit(number, [row])
            reference = references[header.path]
            marks = {"ordinal": reference, "session": record.session, "sequence": record.sequence}
            parts += [frame(FrameKind.RECORD, raw, raw_nbytes=len(raw), **marks), raw]
            parts += [frame(FrameKind.COMMIT, commit, **marks), commit]
            end = pwrite_all(target, parts, end)
    finally:
        os.close(source)
        os.close(target)
    _take_place(temporary, path)
    return places


def _take_place(temporary: Path, path: Path) -> None:
    """Replace the damaged file by the new one, durably."""
    sync_paths([temporary], path.parent)
    failpoint("mend.before_rename")
    rename(temporary, path)
    sync_paths([path.parent], path.parent)
