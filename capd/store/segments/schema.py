"""The columns of the segments. Polars, DuckDB and pandas read them as they are; capd reads `header` and `body`.

`body` and `header` are the msgpack of the catalog, exact and complete. The other columns repeat them for queries.
Integers of `min`, `max` and `absmax` beyond 2^53 are rounded in the columns.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from capd_client.protocol.key import Key

__all__ = [
    "BODY_COLUMNS",
    "FOOTERS",
    "PARTS",
    "RECORD_COLUMNS",
    "SERIES_COLUMNS",
    "record_schema",
    "series_schema",
]

FOOTERS = b"capd.footers"
"""The metadata of a series segment with the Parquet footers of the record segments, so that no reader fetches them."""

PARTS = "parts"
BODY_COLUMNS = ("series", "record", "stored_bytes", "body")
"""The columns that capd itself reads of records. They are the last ones, and so adjacent in each row group."""

SERIES_COLUMNS = (
    "id", "path", *Key.__struct_fields__, "dtype", "kept", "records", "max_shape", "raw_bytes", "stored_bytes",
    "header", PARTS, "shards", "documents",
)  # fmt: skip
RECORD_COLUMNS = (
    "path", "iteration", "micro_batch", "call", "sample_idx", "batch_idx", "sequence_idx", "attempt", "time_ns",
    "recompute", "shape", "raw_bytes", "device", "requires_grad", "is_leaf", "metadata", "attributes", "count", "nan",
    "inf", "zero", "min", "max", "absmax", "sum", "sum_sq", "sum_cube", "sum_fourth", "exponents", "exponent_counts",
    *BODY_COLUMNS,
)  # fmt: skip

_KEY_INTEGERS = frozenset({"rank", "layer"})


@cache
def series_schema() -> Any:
    """Return the Arrow schema of a series segment."""
    import pyarrow as pa

    part = pa.struct(
        [("segment", pa.int32()), ("row", pa.int64()), ("record", pa.int64()), ("records", pa.int64())]
    )
    shard = pa.struct([("shard", pa.int64()), ("nbytes", pa.int64()), ("crc32c", pa.uint32())])
    document = pa.struct([("name", pa.string()), ("nbytes", pa.int64()), ("crc32c", pa.uint32())])
    types = {
        "id": pa.int64(), "records": pa.int64(), "max_shape": pa.list_(pa.int64()), "raw_bytes": pa.int64(),
        "stored_bytes": pa.int64(), "header": pa.binary(), PARTS: pa.list_(part), "shards": pa.list_(shard),
        "documents": pa.list_(document), **{name: pa.int64() for name in _KEY_INTEGERS},
    }  # fmt: skip
    return pa.schema([(name, types.get(name, pa.string())) for name in SERIES_COLUMNS])


@cache
def record_schema() -> Any:
    """Return the Arrow schema of a record segment."""
    import pyarrow as pa

    # Parquet keeps equal texts once anyway. As Arrow dictionaries, they could not be joined with those of the series.
    texts = dict.fromkeys(("path", "device", "metadata", "attributes"), pa.string())
    types = {
        **texts, "recompute": pa.bool_(),
        "requires_grad": pa.bool_(), "is_leaf": pa.bool_(), "shape": pa.list_(pa.int64()),
        "exponents": pa.list_(pa.int16()), "exponent_counts": pa.list_(pa.int64()), "body": pa.binary(),
        **{name: pa.float64() for name in ("min", "max", "absmax", "sum", "sum_sq", "sum_cube", "sum_fourth")},
    }  # fmt: skip
    return pa.schema([(name, types.get(name, pa.int64())) for name in RECORD_COLUMNS])
