"""Checks the records of one shard of a series in all places: sealed file, `.partial`, log, catalog, metadata.

The order of reading makes the check safe while a daemon works. First come the promises (catalog totals, the published
shape, the logs). Then come the files that must keep them. Last come the catalog rows that must know the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from capd.errors import DamagedRecord
from capd.store.catalog.sums import Slice, read_slice
from capd.store.disk.layout import partial_path
from capd.store.format.dtypes import stored_shape
from capd.store.format.frames import UNKNOWN_CLIENT, RecordRow, SeriesHeader
from capd.store.format.ranges import RangeSet
from capd.store.scan.published import Published
from capd.store.verify.damage import Damage, Kind
from capd.store.verify.file import CheckedFile, check_file

__all__ = ["SeriesPromise", "ShardResult", "check_shard"]

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class SeriesPromise:
    """The promised content of a series, read before its shards.

    Attributes:
        run: The directory of the run.
        run_ids: The run ids that a HEADER may name.
        node: The node that wrote the series.
        header: The header of the series.
        catalog: The node's catalog and the series' id in it, None without a usable catalog.
        known: The number of records that the catalog counted.
        count: The minimum number of records, but no more than all files can hold.
        published: The published columns, None if the metadata is damaged.
        shape: The shape that plain Zarr readers see.
        logged: The rows of the records in small logs, by number.
        files: The sealed shards, by number.
    """

    run: Path
    run_ids: frozenset[str]
    node: str
    header: SeriesHeader
    catalog: tuple[Path, int] | None
    known: int
    count: int
    published: Published | None
    shape: tuple[int, ...]
    logged: Mapping[int, RecordRow]
    files: Mapping[int, Path]

    @property
    def shape0(self) -> int:
        """The number of records that plain Zarr readers see."""
        return self.shape[0]

    def shards(self) -> list[int]:
        """Return the numbers of all shards that exist or should exist."""
        per_shard = self.header.geometry.shard_records
        logged = {number // per_shard for number in self.logged}
        return sorted({*range(-(-self.count // per_shard)), *self.files, *logged})

    @property
    def spool(self) -> Path:
        """The directory of the node's `.partial` files."""
        return self.run / ".capd" / f"node={self.node}" / "spool"


@dataclass(slots=True)
class ShardResult:
    """The result for a shard. records: the number of records. nbytes: the bytes read."""

    records: int = 0
    nbytes: int = 0
    damaged: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_shard(promise: SeriesPromise, number: int) -> ShardResult:
    """Check shard `number`.

    Raises:
        OSError: A file cannot be read.
        StoreError: The catalog cannot be read.
    """
    return _ShardCheck(promise, number).run()


class _ShardCheck:
    def __init__(self, promise: SeriesPromise, number: int) -> None:
        self._promise, self._number = promise, number
        per_shard = promise.header.geometry.shard_records
        self._range = range(number * per_shard, (number + 1) * per_shard)
        # The records that a finding already names.
        self._seen: set[int] = set()
        self.out = ShardResult()

    def run(self) -> ShardResult:
        promise = self._promise
        partial = partial_path(promise.spool, promise.header.path, self._number)
        open_file = self._file(partial, self._range.start, sealed=False)
        path = promise.files.get(self._number, self._final())
        sealed = self._file(path, promise.shape0, sealed=True)
        if sealed is None and promise.shape0 > self._range.start:
            lost = range(self._range.start, min(promise.shape0, self._range.stop))
            self._find("shard", lost, path, None, "the shard is missing")
        rows = {n: row for n, row in promise.logged.items() if n in self._range}
        for file in (open_file, sealed):
            rows |= {} if file is None or file.is_foreign else file.rows
        nameless = self._nameless(sealed)
        self.out.records = len(rows.keys() | nameless)
        self._check_columns(sealed)
        self._check_catalog(rows, nameless, sealed)
        return self.out

    def _final(self) -> Path:
        zeros = ["0"] * len(self._promise.header.geometry.extents)
        return self._promise.run.joinpath(self._promise.header.path, "data", "c", str(self._number), *zeros)

    def _file(self, path: Path, expected: int, *, sealed: bool) -> CheckedFile | None:
        promise = self._promise
        owner = (promise.run_ids, promise.node)
        found = check_file(path, promise.header, self._number, expected, owner, sealed=sealed)
        if found is None:
            return None
        self.out.nbytes += found.nbytes
        for finding in found.findings:
            self._find("shard" if sealed else "spool", finding.records, path, finding.offset, finding.what)
        if found.rewritten:
            relative = path.relative_to(promise.run)
            self.out.notes.append(f"{relative}: a Zarr tool rewrote it: it is readable, but has no journal")
        if found.header is not None and found.header != promise.header and not found.is_foreign:
            self._find(
                "catalog", (), path, None, "the catalog describes the series differently than its HEADER"
            )
        return found

    def _nameless(self, sealed: CheckedFile | None) -> set[int]:
        """Return the records in a shard that a Zarr tool rewrote: they have an index entry but no COMMIT."""
        if sealed is None or not sealed.rewritten:
            return set()
        return set(range(self._range.start, min(self._promise.shape0, self._range.stop))) - sealed.rows.keys()

    def _find(
        self, kind: Kind, records: range | tuple[int, ...], path: Path, offset: int | None, what: str
    ) -> None:
        promise = self._promise
        self._seen.update(records)
        file = str(path.relative_to(promise.run))
        self.out.damaged.append(
            Damage(kind, promise.header.path, tuple(records), file, offset, what, promise.node)
        )

    def _check_columns(self, sealed: CheckedFile | None) -> None:
        published, header = self._promise.published, self._promise.header
        stop = min(self._promise.shape0, self._range.stop)
        if published is None or sealed is None or sealed.is_foreign or stop <= self._range.start:
            return
        path = self._promise.run / header.path / "zarr.json"
        try:
            columns = published.rows(self._range.start, stop)
        except DamagedRecord as error:
            self._find("metadata", range(self._range.start, stop), path, None, str(error))
            return
        large = [
            n for n in range(self._range.start, stop) if n in sealed.rows and self._exceeds(sealed.rows[n])
        ]
        if large:
            path = self._promise.run / header.path / "data" / "zarr.json"
            self._find(
                "metadata", tuple(large), path, None, "the array's shape is too small for these records"
            )
        wrong = [
            number
            for number, column in enumerate(columns, self._range.start)
            if (row := sealed.rows.get(number)) is not None and column != (row.moment, row.shape)
        ]
        if wrong:
            self._find(
                "metadata", tuple(wrong), path, None, "published moments or shapes contradict the commits"
            )

    def _exceeds(self, row: RecordRow) -> bool:
        shape = stored_shape(self._promise.header.dtype, row.shape)
        return any(n > held for n, held in zip(shape, self._promise.shape[1:], strict=False))

    def _check_catalog(
        self, rows: Mapping[int, RecordRow], nameless: set[int], sealed: CheckedFile | None
    ) -> None:
        if self._promise.catalog is None:
            return
        path, identity = self._promise.catalog
        try:
            found = read_slice(path, identity, self._range.start, self._range.stop)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            self._find("catalog", (), path, None, f"rows of the series cannot be read: {error}")
            return
        in_shard = {} if sealed is None or sealed.is_foreign else sealed.rows
        for number, what in self._row_problems(rows, found, in_shard.keys()):
            self._find("catalog", (number,), path, None, f"table records, row {(identity, number)}: {what}")
        lost = [number for number, row in found.rows.items() if row.is_lost and number not in self._seen]
        if lost:
            self._find("shard", tuple(lost), path, None, "no file describes these records any more")
        absent = sorted((in_shard.keys() | nameless) - found.rows.keys())
        if absent:
            self._find("catalog", tuple(absent), path, None, "sealed records are not in the catalog")
        held = rows.keys() | nameless | self._seen
        gone = [n for n in found.rows if n not in held and n < self._promise.known]
        if gone:
            kind: Kind = "shard" if gone[0] < self._promise.shape0 else "spool"
            self._find(kind, tuple(gone), path, None, "records of the catalog are in no file")

    def _row_problems(
        self, rows: Mapping[int, RecordRow], found: Slice, in_shard: Set[int]
    ) -> Iterator[tuple[int, str]]:
        for number, commit in rows.items():
            row = found.rows.get(number)
            if row is None:
                continue
            differences = _differences(commit, row)
            # In the first case the COMMIT in the sealed shard was lost.
            if row.client == UNKNOWN_CLIENT and number not in in_shard:
                differences = [name for name in differences if name in ("moment", "shape", "nbytes")]
            elif row.client != UNKNOWN_CLIENT and row.sequence not in found.acked.get(row.client, RangeSet()):
                yield number, f"sequence {row.sequence} is not among the acknowledged ones"
            if differences:
                yield number, f"it differs from the commit in {', '.join(differences)}"


def _differences(commit: RecordRow, row: RecordRow) -> list[str]:
    """Return the names of the fields in which a catalog row differs from its COMMIT in any bit."""
    found = _differing(commit, row)
    if "stats" in found and commit.stats is not None and row.stats is not None:
        found = [name for name in found if name != "stats"] + _differing(commit.stats, row.stats)
    return found


def _differing(a: msgspec.Struct, b: msgspec.Struct) -> list[str]:
    return [name for name in a.__struct_fields__ if _encode(getattr(a, name)) != _encode(getattr(b, name))]
