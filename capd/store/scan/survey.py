"""Reads rows back from the sealed shards of a run: for a new catalog, for a reader without one, and for a repair.

Rows come from COMMIT frames. A COMMIT can be lost, or a Zarr tool can rewrite a shard without its frames. The published
moments and shapes then identify the record. It stays readable, but without its statistics and metadata. A survey is
slower than a catalog, because it reads every frame header of every shard.

The COMMITs of a shard that was moved to an object store are not read. Its records come from the published columns, too:
they keep their numbers and moments, and their elements are read from the object. Their statistics and metadata are
unknown, and so are client and sequence: a client that sends one of them again would not be recognised. A writer
completes them from the segments of the upload, if it reaches the object store (`capd.store.remote.moved_rows`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from capd.errors import DamagedRecord, StoreError
from capd.store.catalog.rows import SeriesRow
from capd.store.disk.layout import series_on_disk
from capd.store.format.dtypes import stored_shape
from capd.store.format.frames import UNKNOWN_CLIENT, UNKNOWN_MOMENT, RecordRow, SeriesHeader
from capd.store.scan.described import described
from capd.store.scan.moved_shard import MovedShard, moved_shard
from capd.store.scan.published import Published, read_published
from capd.store.scan.scan import ScannedLog, ScannedShard, read_log, scan_shard
from capd_client.protocol.key import MAX_NDIM, Moment

__all__ = [
    "SurveyedSeries",
    "has_moved_shards",
    "log_if_readable",
    "moved_shards",
    "row_from_columns",
    "scan_if_readable",
    "shard_files",
    "survey",
    "survey_series",
]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SurveyedSeries:
    """The sealed records of a series by number.

    Attributes:
        header: The series.
        rows: Record number → row. Records that nothing identifies are absent.
        shares: Record number → its share of the stored bytes of its commit.
        stored_nbytes: The stored bytes of all records.
        lost: The numbers below the newest record without a row.
        moved: The shards that are in an object store.
    """

    header: SeriesHeader
    rows: dict[int, RecordRow] = field(default_factory=dict)
    shares: dict[int, int] = field(default_factory=dict)
    stored_nbytes: int = 0
    lost: list[int] = field(default_factory=list)
    moved: dict[int, MovedShard] = field(default_factory=dict)

    def keep_numbers(self) -> None:
        """Give each lost record a row that marks it as lost.

        The other records then keep their numbers, and plain readers see no gap.
        """
        axes = len(next((row.shape for row in self.rows.values()), self.header.geometry.extents))
        row = row_from_columns(self.header, (UNKNOWN_MOMENT, (0,) * axes))
        self.rows |= dict.fromkeys(self.lost, row)

    def as_row(self) -> SeriesRow:
        """Return the row that a catalog would have for the series."""
        rows, count = self.rows, max(self.rows, default=-1) + 1
        return SeriesRow(
            id=-1,
            header=self.header,
            records=count,
            sealed=count,
            sealing=False,
            max_shape=tuple(map(max, zip(*(row.shape for row in rows.values()), strict=True))),
            raw_bytes=sum(row.nbytes for row in rows.values()),
            stored_bytes=self.stored_nbytes,
        )


def survey(run: Path, node: str, known: Mapping[str, SeriesHeader]) -> Iterator[SurveyedSeries]:
    """Yield every series of a node ("": of all nodes) with sealed shards. known: headers, in case HEADERs are lost."""
    for path in series_on_disk(run):
        found = survey_series(run, path, node, known.get(path))
        if found is not None:
            yield found


def survey_series(run: Path, path: str, node: str, header: SeriesHeader | None) -> SurveyedSeries | None:
    """Return one series; None if it belongs to another node or nothing identifies it. node: "" for any node."""
    is_given = header is not None
    files = shard_files(run / path)
    scans = {number: scan_if_readable(file, None) for number, file in files.items()}
    own = {
        number: scanned
        for number, scanned in scans.items()
        if scanned is not None and (scanned.header.path, scanned.shard) == (path, number)
    }
    for scanned in own.values():
        if node and scanned.file is not None and scanned.file.node != node:
            return None
        header = scanned.header
    published = _published(run / path)
    if not files and (published is None or published.count == 0):
        # There are only the directories of a shard that was begun.
        return None
    if header is None and (documents := described(run, path)) is not None and node in ("", documents[1]):
        header = documents[0]
    is_own = is_given if published is None else node in ("", published.node)
    if header is None or not (own or is_own):
        logger.warning("%s: nothing identifies the series; `capd verify` lists the damage", path)
        return None
    moved = moved_shards(run, path)
    unread = [number for number, before in scans.items() if before is None and number not in moved]
    for number in unread:
        if (again := scan_if_readable(files[number], (header, number))) is not None:
            own[number] = again
    found = SurveyedSeries(header, moved=moved)
    for _, scanned in sorted(own.items()):
        for run_ in scanned.runs:
            found.stored_nbytes += run_.end - run_.start
            for record, row in enumerate(run_.commit.rows, run_.commit.first):
                found.rows[record], found.shares[record] = row, run_.share
    _fill(found, published)
    _count_moved(found)
    found.rows = dict(sorted(found.rows.items()))
    return found


def shard_files(series: Path) -> dict[int, Path]:
    """Return the sealed shard files of a series by number. Any file at the place of a shard counts."""
    found: dict[int, Path] = {}
    for entry in (series / "data" / "c").iterdir() if (series / "data" / "c").is_dir() else ():
        if not entry.name.isdecimal() or str(int(entry.name)) != entry.name:
            continue
        place = entry
        # The loop is bounded, because links may form a circle.
        for _ in range(MAX_NDIM + 1):
            place = place / "0" if place.is_dir() else place
        # A shard that is begun has only directories, which may be newer than the loop's last look.
        if place.exists() and not place.is_dir():
            found[int(entry.name)] = place
    return dict(sorted(found.items()))


def moved_shards(run: Path, path: str) -> dict[int, MovedShard]:
    """Return the shards of a series that were moved to an object store, by number.

    A damaged stub is left out: who reads or checks the shard finds the damage.
    """
    found: dict[int, MovedShard] = {}
    for number, file in shard_files(run / path).items():
        with contextlib.suppress(OSError, StoreError):
            moved = moved_shard(run, file)
            if moved is not None:
                found[number] = moved
    return found


def has_moved_shards(run: Path) -> bool:
    """Return whether shards of a run were moved to an object store. It looks at every shard file."""
    return any(moved_shards(run, path) for path in series_on_disk(run))


def scan_if_readable(file: Path, known: tuple[SeriesHeader, int] | None) -> ScannedShard | None:
    """Return the journal of a shard; None, with a warning, if the file cannot be read."""
    try:
        return scan_shard(file, known)
    except OSError as error:
        logger.warning("%s cannot be read: %s", file, error)
        return None


def log_if_readable(file: Path) -> ScannedLog | None:
    """Return the journal of a small log; None, with a warning, if the file cannot be read."""
    try:
        return read_log(file)
    except OSError as error:
        logger.warning("%s cannot be read: %s", file, error)
        return None


def _published(series: Path) -> Published | None:
    try:
        return read_published(series)
    except DamagedRecord as error:
        logger.warning("%s: %s", series, error)
        return None


def _fill(found: SurveyedSeries, published: Published | None) -> None:
    """Identify the records whose COMMIT is lost from the published columns."""
    count = max(max(found.rows, default=-1) + 1, published.count if published else 0)
    missing = [number for number in range(count) if number not in found.rows]
    if missing and published is not None:
        try:
            columns = dict(enumerate(published.rows(missing[0], missing[-1] + 1), missing[0]))
        except DamagedRecord as error:
            logger.warning("%s: %s", found.header.path, error)
            columns = {}
        for number in missing:
            if number in columns and found.header.geometry.fits(
                stored_shape(found.header.dtype, columns[number][1])
            ):
                row = row_from_columns(found.header, columns[number])
                found.rows[number] = row
    found.lost = [number for number in missing if number not in found.rows]
    while found.lost and found.lost[-1] > max(found.rows, default=-1):
        found.lost.pop()
    per_shard = found.header.geometry.shard_records
    uncommitted = [number for number in missing if number // per_shard not in found.moved]
    if uncommitted:
        logger.warning(
            "%s: the commits of %d records are lost; the published moments identify %d of the records",
            found.header.path, len(uncommitted), len({*uncommitted} - {*found.lost}),
        )  # fmt: skip


def _count_moved(found: SurveyedSeries) -> None:
    """Count the bytes of moved shards for their records."""
    per_shard = found.header.geometry.shard_records
    for number, moved in found.moved.items():
        records = [n for n in range(number * per_shard, (number + 1) * per_shard) if n in found.rows]
        # The index and the HEADER count with the records. Nothing else is known here.
        share = moved.nbytes // max(1, len(records))
        found.shares |= dict.fromkeys(records, share)
        found.stored_nbytes += share * len(records)
    if found.moved:
        logger.warning(
            "%s: the commits of %d shards are at %s; the published moments identify their records",
            found.header.path, len(found.moved), next(iter(found.moved.values())).to,
        )  # fmt: skip


def row_from_columns(header: SeriesHeader, columns: tuple[Moment, tuple[int, ...]]) -> RecordRow:
    """Return the row of a record from the published columns. Its client is unknown."""
    moment, shape = columns
    nbytes = prod(stored_shape(header.dtype, shape)) * header.geometry.itemsize
    return RecordRow(UNKNOWN_CLIENT, 0, shape, nbytes, moment)
