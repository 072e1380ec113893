"""Checks the records of one shard of a series in all places: sealed file, `.partial`, log, catalog, metadata.

The order of reading makes the check safe while a daemon works. First come the promises (catalog totals, the published
shape, the logs). Then come the files that must keep them. Last come the catalog rows that must know the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path

import msgspec

from capd.errors import DamagedRecord
from capd.store.catalog.sums import Slice, read_slice
from capd.store.disk.layout import partial_path, shard_path
from capd.store.format.dtypes import is_errors, stored_shape
from capd.store.format.frames import UNKNOWN_CLIENT, RecordRow
from capd.store.format.ranges import RangeSet
from capd.store.scan.moved_shard import moved_shard
from capd.store.verify.damage import Kind, Report
from capd.store.verify.file import CheckedFile, check_file
from capd.store.verify.series import SeriesPromise

__all__ = ["check_shard"]

_encode = msgspec.msgpack.Encoder().encode


def check_shard(promise: SeriesPromise, number: int) -> Report:
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
        self.out = Report(promise.run)

    def run(self) -> Report:
        promise = self._promise
        partial = partial_path(promise.spool, promise.header.path, self._number)
        open_file = self._file(partial, self._range.start, sealed=False)
        path = promise.files.get(self._number) or shard_path(promise.run, promise.header, self._number)
        moved = self._moved(path)
        sealed = None if moved else self._file(path, promise.shape0, sealed=True)
        if not moved and sealed is None and promise.shape0 > self._range.start:
            lost = range(self._range.start, min(promise.shape0, self._range.stop))
            self._find("shard", lost, path, "the shard is missing")
        rows = {n: row for n, row in promise.logged.items() if n in self._range}
        for file in (open_file, sealed):
            rows |= {} if file is None or file.is_foreign else file.rows
        nameless = self._nameless(sealed)
        found = len(rows.keys() | nameless)
        if is_errors(self._promise.header.dtype):
            self.out.error_records = found
        else:
            self.out.records = found
        # The catalog must have all records of a moved shard.
        nameless |= set(self._range if moved else ())
        self._check_columns(sealed)
        self._check_catalog(rows, nameless, sealed)
        return self.out

    def _file(self, path: Path, expected: int, *, sealed: bool) -> CheckedFile | None:
        promise = self._promise
        kind: Kind = "shard" if sealed else "spool"

        def find(records: Iterable[int], offset: int | None, what: str) -> None:
            self._find(kind, records, path, what, offset)

        found = check_file(path, promise, self._number, expected, find, sealed=sealed)
        if found is None:
            return None
        self.out.nbytes += found.nbytes
        if found.rewritten:
            relative = path.relative_to(promise.run)
            self.out.notes.append(f"{relative}: a Zarr tool rewrote it: it is readable, but has no journal")
        if found.header is not None and found.header != promise.header and not found.is_foreign:
            self._find("catalog", (), path, "the catalog describes the series differently than its HEADER")
        return found

    def _moved(self, path: Path) -> bool:
        """Return whether the shard is in an object store, or was and its stub is damaged. Only the stub is checked."""
        promise = self._promise
        try:
            moved = moved_shard(promise.run, path)
            if moved is None:
                return False
            if promise.shape0 < self._range.stop:
                raise DamagedRecord(
                    f"the stub says that the shard was moved to {moved.to}, but only {promise.shape0} records are "
                    "published"
                )
            self.out.moved[str(moved.to)] += 1
        except DamagedRecord as error:
            self._find("shard", self._range, path, str(error))
        return True

    def _nameless(self, sealed: CheckedFile | None) -> set[int]:
        """Return the records in a shard that a Zarr tool rewrote: they have an index entry but no COMMIT."""
        if sealed is None or not sealed.rewritten:
            return set()
        return set(range(self._range.start, min(self._promise.shape0, self._range.stop))) - sealed.rows.keys()

    def _find(
        self, kind: Kind, records: Iterable[int], path: Path, what: str, offset: int | None = None
    ) -> None:
        promise, records = self._promise, sorted(records)
        self._seen.update(records)
        self.out.find(
            kind, path, what, series=promise.header.path, records=records, offset=offset, node=promise.node
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
            self._find("metadata", range(self._range.start, stop), path, str(error))
            return
        large = [
            n for n in range(self._range.start, stop) if n in sealed.rows and self._exceeds(sealed.rows[n])
        ]
        if large:
            path = self._promise.run / header.path / "data" / "zarr.json"
            self._find("metadata", large, path, "the array's shape is too small for these records")
        wrong = [
            number
            for number, column in enumerate(columns, self._range.start)
            if (row := sealed.rows.get(number)) is not None and column != (row.moment, row.shape)
        ]
        if wrong:
            self._find("metadata", wrong, path, "published moments or shapes contradict the commits")

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
            self._find("catalog", (), path, f"rows of the series cannot be read: {error}")
            return
        in_shard = {} if sealed is None or sealed.is_foreign else sealed.rows
        for number, what in self._row_problems(rows, found, in_shard.keys()):
            self._find("catalog", (number,), path, f"table records, row {(identity, number)}: {what}")
        lost = [number for number, row in found.rows.items() if row.is_lost and number not in self._seen]
        if lost:
            self._find("shard", lost, path, "no file describes these records any more")
        absent = sorted((in_shard.keys() | nameless) - found.rows.keys())
        if absent:
            self._find("catalog", absent, path, "sealed records are not in the catalog")
        held = rows.keys() | nameless | self._seen
        gone = [n for n in found.rows if n not in held and n < self._promise.known]
        if gone:
            kind: Kind = "shard" if gone[0] < self._promise.shape0 else "spool"
            self._find(kind, gone, path, "records of the catalog are in no file")

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
