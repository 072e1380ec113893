"""The record segment: one row for each record, ordered by series and number.

Row groups are small, so that a reader of one series fetches few bytes. The reader needs the footer of the file, which
the series segment holds, and one range for each row group.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from capd.errors import ObjectStoreError
from capd.store.format.frames import RecordRow, decode_row
from capd.store.segments.bounded import bytes_of
from capd.store.segments.schema import BODY_COLUMNS, RECORD_COLUMNS, record_schema
from capd_client.protocol.key import Moment

__all__ = ["BodyRow", "RecordSegment", "SegmentWriter", "WrittenSegment", "iterations_of"]

_GROUP_ROWS = 8192
_MAX_GROUP_ROWS = 1 << 20
# The body of a record is at most a frame; a group that unfolds to more is not of capd.
_MAX_GROUP_NBYTES = 1 << 30
_MAX_FOOTER_NBYTES = 64 << 20
_KEPT_GROUPS = 4
_MAGIC = b"PAR1"
_MOMENT = Moment.__struct_fields__


class BodyRow(NamedTuple):
    """What capd reads of a record: its series' id, its number, its share of the stored bytes, and its row."""

    series: int
    record: int
    stored_bytes: int
    body: bytes


class WrittenSegment(NamedTuple):
    """A record segment. starts: the first row of each series id. footer: the footer as a file of its own."""

    rows: int
    starts: dict[int, int]
    footer: bytes


class SegmentWriter:
    """Writes a record segment in bounded memory. Use it in a `with` statement, then call `finish`."""

    def __init__(self, file: Path) -> None:
        """Begin the file, which must not exist, or be empty."""
        import pyarrow.parquet as pq

        self._file = file
        self._writer = pq.ParquetWriter(
            file,
            record_schema(),
            compression="zstd",
            write_statistics=["path", "iteration", "series", "record"],
            # A reader of one row group cannot check the checksum of the file.
            write_page_checksum=True,
        )
        self._columns: dict[str, list[Any]] = {name: [] for name in RECORD_COLUMNS}
        self._starts: dict[int, int] = {}
        self._rows = 0

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def add(self, series: int, path: str, record: int, stored_bytes: int, body: bytes) -> None:
        """Add the next record. The records of a series follow each other, in order.

        Args:
            series: The id of the series.
            path: Its path.
            record: The number of the record.
            stored_bytes: Its share of the stored bytes.
            body: Its row as the catalog has it.
        """
        self._starts.setdefault(series, self._rows)
        for name, value in _plain(decode_row(body)).items():
            self._columns[name].append(value)
        for name, value in (
            ("path", path), ("series", series), ("record", record), ("stored_bytes", stored_bytes), ("body", body)
        ):  # fmt: skip
            self._columns[name].append(value)
        self._rows += 1
        if self._rows % _GROUP_ROWS == 0:
            self._flush()

    def finish(self) -> WrittenSegment:
        """Complete the file."""
        self._flush()
        self._writer.close()
        with self._file.open("rb") as file:
            file.seek(-8, io.SEEK_END)
            nbytes = int.from_bytes(file.read(4), "little")
            file.seek(-8 - nbytes, io.SEEK_END)
            footer = _MAGIC + file.read(nbytes + 8)
        return WrittenSegment(self._rows, self._starts, footer)

    def _flush(self) -> None:
        import pyarrow as pa

        if self._columns["record"]:
            self._writer.write_table(
                pa.table(self._columns, schema=record_schema()), row_group_size=_GROUP_ROWS
            )
            self._columns = {name: [] for name in RECORD_COLUMNS}


_SUMS = ("sum", "sum_sq", "sum_cube", "sum_fourth")


def _plain(row: RecordRow) -> dict[str, Any]:
    """Return the columns of a record that only queries read."""
    stats = row.stats
    numbers = dict.fromkeys(("count", "nan", "inf", "zero", "min", "max", "absmax", *_SUMS))
    found: dict[str, Any] = {
        **{name: getattr(row.moment, name) for name in _MOMENT},
        "shape": row.shape,
        "raw_bytes": row.nbytes,
        "device": row.device,
        "requires_grad": row.requires_grad,
        "is_leaf": row.is_leaf,
        "metadata": row.metadata,
        "attributes": row.attributes,
        **numbers,
        "exponents": None,
        "exponent_counts": None,
    }
    if stats is not None:
        found |= {name: getattr(stats, name) for name in ("count", "nan", "inf", "zero", *_SUMS)}
        found |= {name: _float(getattr(stats, name)) for name in ("min", "max", "absmax")}
        found |= {"exponents": stats.exponents[::2], "exponent_counts": stats.exponents[1::2]}
    return found


def _float(value: int | float | None) -> float | None:
    # An integer of a 64-bit dtype may have no exact float.
    return None if value is None else float(value)


def iterations_of(footers: Iterable[bytes]) -> tuple[int, int] | None:
    """Return the first and the last iteration of all records, as the footers of their segments have them."""
    import pyarrow.parquet as pq

    found: list[int] = []
    for footer in footers:
        metadata = pq.read_metadata(io.BytesIO(footer))
        at = metadata.schema.names.index("iteration")
        for number in range(metadata.num_row_groups):
            known = metadata.row_group(number).column(at).statistics
            found += [known.min, known.max]
    return (min(found), max(found)) if found else None


class RecordSegment:
    """A record segment that is read by ranges."""

    def __init__(self, place: object, footer: bytes, nbytes: int, fetch: Callable[[int, int], bytes]) -> None:
        """Describe the segment.

        Args:
            place: Where it is, for messages.
            footer: Its footer, as `WrittenSegment` has it.
            nbytes: Its size.
            fetch: A function that returns the bytes start ≤ offset < end.

        Raises:
            ObjectStoreError: It is not a record segment.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._place, self._fetch = place, fetch
        # Small series share a row group.
        self._group = lru_cache(_KEPT_GROUPS)(self._read_group)
        try:
            if len(footer) > _MAX_FOOTER_NBYTES:
                raise ValueError("its footer is too large")
            self._metadata = pq.read_metadata(io.BytesIO(footer))
            self._columns = [self._metadata.schema.names.index(name) for name in BODY_COLUMNS]
            self._starts = [0]
            self._ranges: list[tuple[int, int]] = []
            for number in range(self._metadata.num_row_groups):
                group = self._metadata.row_group(number)
                self._starts.append(self._starts[-1] + group.num_rows)
                self._ranges.append(self._range(group, nbytes))
        except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
            raise self._damaged(error) from error

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self._starts[-1]

    def read(self, first: int, last: int) -> Iterator[BodyRow]:
        """Yield the rows first ≤ number < last. One range is fetched for each row group that they touch.

        Raises:
            ObjectStoreError: They cannot be read.
        """
        for number, (start, end) in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            if start < last and first < end:
                rows = self._group(number)
                yield from rows[max(first - start, 0) : last - start]

    def _read_group(self, number: int) -> list[BodyRow]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        start, end = self._ranges[number]
        held = self._fetch(start, end)
        try:
            if len(held) != end - start:
                raise ValueError(f"it ends within bytes {start} to {end}")
            source = pa.PythonFile(_Window(held, start), mode="r")
            file = pq.ParquetFile(
                source, metadata=self._metadata, pre_buffer=False, page_checksum_verification=True,
                read_dictionary=["body"],
            )  # fmt: skip
            table = file.read_row_group(number, columns=list(BODY_COLUMNS))
            *numbers, bodies = (table.column(name) for name in BODY_COLUMNS)
            columns = [*(column.to_pylist() for column in numbers), bytes_of(bodies)]
            found = [BodyRow(*row) for row in zip(*columns, strict=True)]
            for row in found:
                if not all(type(value) is int for value in row[:3]) or not isinstance(row.body, bytes):
                    raise ValueError("a row lacks a value")
            return found
        except (pa.ArrowException, OSError, ValueError, TypeError) as error:
            raise self._damaged(error) from error

    def _range(self, group: Any, nbytes: int) -> tuple[int, int]:
        """Return the bytes of the columns in a row group. Their writer made them neighbours."""
        chunks = [group.column(at) for at in self._columns]
        starts = [
            min(offset for offset in (chunk.dictionary_page_offset, chunk.data_page_offset) if offset)
            for chunk in chunks
        ]
        ends = [start + chunk.total_compressed_size for start, chunk in zip(starts, chunks, strict=True)]
        unfolded = sum(chunk.total_uncompressed_size for chunk in chunks)
        start, end = min(starts), max(ends)
        if (
            not 0 < group.num_rows <= _MAX_GROUP_ROWS
            or unfolded > _MAX_GROUP_NBYTES
            or not 0 <= start < end <= nbytes
        ):
            raise ValueError("its footer is not valid")
        return start, end

    def _damaged(self, error: object) -> ObjectStoreError:
        # Some texts of Arrow have several lines.
        return ObjectStoreError(f"{self._place} is no segment of records: {' '.join(str(error).split())}")


class _Window(io.RawIOBase):
    """A part of a file as a whole file. Reads outside of it fail."""

    def __init__(self, held: bytes, start: int) -> None:
        super().__init__()
        self._held, self._start, self._at = held, start, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._start + len(self._held)}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, nbytes: int = -1) -> bytes:
        first = self._at - self._start
        if first < 0 or nbytes < 0:
            raise OSError("a read outside of the fetched range")
        found = self._held[first : first + nbytes]
        self._at += len(found)
        return found
