"""The series segment: one row for each series of a node, with its objects and the places of its records."""

from __future__ import annotations

import base64
import io
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from capd.errors import ObjectStoreError
from capd.store.catalog.rows import SeriesRow, series_row
from capd.store.documents.json_document import MAX_LENGTH
from capd.store.format.dtypes import kept_of, stored_type
from capd.store.segments.bounded import bytes_of, check_lengths
from capd.store.segments.schema import FOOTERS, SERIES_COLUMNS, series_schema
from capd_client.protocol.scalars import is_scalar

__all__ = [
    "DocumentObject",
    "Part",
    "SeriesEntry",
    "ShardObject",
    "quant_types_of",
    "read_series_table",
    "write_series_table",
]

_encode_header = msgspec.msgpack.Encoder().encode
_READ = ("id", "header", "records", "max_shape", "raw_bytes", "stored_bytes", "parts", "shards", "documents")


class Part(NamedTuple):
    """Neighbouring rows of a series in a record segment.

    segment: the generation in its name. row: the first row there. record: the number of its record. records: the rows.
    """

    segment: int
    row: int
    record: int
    records: int


class ShardObject(NamedTuple):
    """An uploaded shard: its number, its bytes and their crc32c."""

    shard: int
    nbytes: int
    crc32c: int


class DocumentObject(NamedTuple):
    """Another uploaded object of a series: its path below the series, such as `data/zarr.json`, bytes and crc32c."""

    name: str
    nbytes: int
    crc32c: int


@dataclass(slots=True)
class SeriesEntry:
    """One series as it is in the object store. row: only its uploaded records count, and all are sealed."""

    row: SeriesRow
    parts: list[Part] = field(default_factory=list)
    shards: list[ShardObject] = field(default_factory=list)
    documents: list[DocumentObject] = field(default_factory=list)


def write_series_table(entries: Sequence[SeriesEntry], footers: Mapping[int, bytes]) -> bytes:
    """Return a series segment.

    Args:
        entries: All series of the node.
        footers: The Parquet footer of each record segment, by its generation.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = series_schema()
    columns: dict[str, list[Any]] = {name: [] for name in SERIES_COLUMNS}
    for entry in entries:
        for name, value in _plain(entry).items():
            columns[name].append(value)
    texts = {str(number): base64.b64encode(footer).decode() for number, footer in footers.items()}
    table = pa.table(columns, schema=schema).replace_schema_metadata({FOOTERS: json.dumps(texts)})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _plain(entry: SeriesEntry) -> dict[str, Any]:
    row, header = entry.row, entry.row.header
    return {
        "id": row.id,
        "path": header.path,
        **msgspec.structs.asdict(header.key),
        "dtype": stored_type(header.dtype).torch,
        "kept": kept_of(header.dtype),
        "records": row.records,
        "max_shape": row.max_shape,
        "raw_bytes": row.raw_bytes,
        "stored_bytes": row.stored_bytes,
        "header": _encode_header(header),
        "parts": [part._asdict() for part in entry.parts],
        "shards": [shard._asdict() for shard in entry.shards],
        "documents": [document._asdict() for document in entry.documents],
    }


def quant_types_of(entries: Sequence[SeriesEntry]) -> list[str]:
    """Return the quant types of tensors with records, in order."""
    keys = [entry.row.header.key for entry in entries if entry.row.records]
    return sorted({key.quant_type for key in keys if not is_scalar(key)})


def read_series_table(payload: bytes, place: object) -> tuple[list[SeriesEntry], dict[int, bytes]]:
    """Return the series in a segment that may come from anybody, and the footers of the record segments.

    Args:
        payload: The bytes of the object. Their checksum was compared with the manifest.
        place: Where it is, for the message.

    Raises:
        ObjectStoreError: It is not a series segment.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(io.BytesIO(payload), read_dictionary=["header"])
        check_lengths(file.metadata)
        table = file.read(columns=list(_READ))
        metadata = file.schema_arrow.metadata or {}
        texts = json.loads(metadata.get(FOOTERS, b"{}"))
        footers = {int(number): base64.b64decode(text, validate=True) for number, text in texts.items()}
        headers = bytes_of(table.column("header"))
        plain = table.drop_columns("header").to_pylist()
        return [
            _entry({**row, "header": header}) for row, header in zip(plain, headers, strict=True)
        ], footers
    except (pa.ArrowException, OSError, sqlite3.DatabaseError, ValueError, TypeError, LookupError,
            AttributeError, RecursionError) as error:  # fmt: skip
        # Some texts of Arrow have several lines.
        raise ObjectStoreError(f"{place} is no segment of series: {' '.join(str(error).split())}") from error


def _entry(plain: Mapping[str, Any]) -> SeriesEntry:
    records = plain["records"]
    # Every uploaded record is sealed.
    row = series_row(
        (plain["id"], plain["header"], records, records, False, json.dumps(plain["max_shape"]),
         plain["raw_bytes"], plain["stored_bytes"])
    )  # fmt: skip
    parts = [Part(**one) for one in plain["parts"]]
    at = 0
    for part in parts:
        if part.record != at or min(part) < 0 or part.records < 1:
            raise ValueError(f"the rows of {row.header.path} are not in order")
        at += part.records
    if at != records:
        raise ValueError(f"{row.header.path} has {records} records, but rows of {at}")
    shards = [ShardObject(**one) for one in plain["shards"]]
    numbers = [shard.shard for shard in shards]
    documents = [DocumentObject(**one) for one in plain["documents"]]
    sizes = [one.nbytes for one in shards] + [one.nbytes for one in documents]
    if numbers != sorted({*numbers}) or not all(0 <= n <= MAX_LENGTH for n in (*numbers, *sizes)):
        raise ValueError(f"the objects of {row.header.path} are not valid")
    if any(".." in document.name.split("/") for document in documents):
        raise ValueError(f"a document of {row.header.path} leads elsewhere")
    return SeriesEntry(row, parts, shards, documents)
