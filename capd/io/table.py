"""Writes one Parquet table: a row for each record with key, moment and statistics. It needs the extra `table`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from capd.io.arrays import described
from capd.output_directory import ExportedFile, locked_directory, write_new
from capd.store.read.series import Record, Series, import_extra
from capd_client.protocol.key import Moment

__all__ = ["TABLE_NAME", "export_table"]

TABLE_NAME = "records.parquet"
_GROUP_ROWS = 10_000

_KEY = {
    "quant_type": "string", "rank": "int64", "layer": "int64", "phase": "string", "layer_type": "string",
    "operation": "string", "component": "string", "tensor_name": "string", "module": "string", "stack": "string",
}  # fmt: skip
_COUNTS = ("count", "nan", "inf", "zero")
_NUMBERS = (
    "min", "max", "absmax", "mean", "std", "kurtosis", "crest", "sum", "sum_sq", "sum_cube", "sum_fourth",
)  # fmt: skip


def export_table(run_id: str, chosen: Sequence[Series], out: Path) -> Iterator[ExportedFile]:
    """Write `out/records.parquet` with 10,000 rows at a time in memory. Yield it when it is whole.

    Elements are read only for records that were committed without statistics.

    Raises:
        CapdError: If the file exists, or pyarrow is missing.
        StoreBusy: If another export writes to `out`.
        OSError: If the file cannot be written.
    """
    import_extra("pyarrow", "table")
    with locked_directory(out):
        path = out / TABLE_NAME
        nbytes = write_new(path, lambda file: _write(file, run_id, chosen))
        yield ExportedFile(path, nbytes, sum(len(series) for series in chosen), 0)


def _write(file: BinaryIO, run_id: str, chosen: Sequence[Series]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    schema = _schema(pa)
    fresh = (series.fresh() for series in chosen)
    rows = (_row(run_id, series, record) for series in fresh for record in series.records)
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        while group := list(islice(rows, _GROUP_ROWS)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


def _schema(pa: Any) -> Any:
    moment = {name: pa.bool_() if name == "recompute" else pa.int64() for name in Moment.__struct_fields__}
    fields = {
        "run": pa.string(),
        "path": pa.string(),
        **{name: getattr(pa, kind)() for name, kind in _KEY.items()},
        "dtype": pa.string(),
        "kept": pa.string(),
        "record": pa.int64(),
        **moment,
        "shape": pa.list_(pa.int64()),
        "device": pa.string(),
        "requires_grad": pa.bool_(),
        "is_leaf": pa.bool_(),
        "metadata": pa.string(),
        "attributes": pa.string(),
        **{name: pa.int64() for name in _COUNTS},
        **{name: pa.float64() for name in _NUMBERS},
        "exponent_histogram": pa.map_(pa.int16(), pa.int64()),
    }
    return pa.schema(list(fields.items()))


def _row(run_id: str, series: Series, record: Record) -> dict[str, Any]:
    stats = record.stats
    numbers = {name: getattr(stats, name) for name in _NUMBERS}
    return {
        "run": run_id,
        "path": series.path,
        **msgspec.structs.asdict(series.key),
        "dtype": series.dtype,
        "kept": series.kept,
        **described(record),
        "metadata": json.dumps(record.metadata),
        "attributes": json.dumps(record.attributes),
        **{name: getattr(stats, name) for name in _COUNTS},
        **{name: None if number is None else float(number) for name, number in numbers.items()},
        "exponent_histogram": list(stats.exponent_histogram.items()),
    }
