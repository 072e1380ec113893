"""Writes a series as one .npz or one .safetensors file: one array for each record, named by its number.

One JSON text describes the arrays. It is the string array `capd` of an .npz and the metadata `capd` of a safetensors
file: {"format": 1, "run", "path", "key", "dtype", "attributes", "records": [{"record", "shape", moment, device,
requires_grad, is_leaf, metadata}]}.

Values that numpy has no type for (bfloat16, 8-bit floats, packed fp4) keep their stored bits in an .npz. safetensors
names bfloat16 and the common fp8 formats, and holds the others as U8.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from capd.errors import CapdError
from capd.output_directory import ExportedFile, locked_directory, write_new
from capd.store.read.series import Record, Series
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.key import Moment

__all__ = ["SUFFIXES", "add_npy", "array_path", "described", "export_arrays", "write_arrays"]

_FORMAT = 1
_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
# Readers of safetensors refuse longer headers.
_MAX_HEADER_NBYTES = 100_000_000


def export_arrays(run_id: str, chosen: Sequence[Series], out: Path, suffix: str) -> Iterator[ExportedFile]:
    """Write each of the chosen series, which keep tensors, to `out/<path of the series><suffix>`.

    One record at a time is in memory.

    Yields:
        Each file when it is whole.

    Raises:
        CapdError: If a file exists.
        StoreBusy: If another export writes to `out`.
        DamagedRecord: If a record cannot be read exactly.
        OSError: If a file cannot be written.
    """
    with locked_directory(out):
        for series in chosen:
            yield write_arrays(run_id, series, array_path(series, out, suffix))


def array_path(series: Series, out: Path, suffix: str) -> Path:
    """Return the path of the file of a series."""
    return out / f"{series.path}{suffix}"


def write_arrays(run_id: str, series: Series, path: Path) -> ExportedFile:
    """Write one series, which keeps tensors, to a file of a suffix of SUFFIXES. Raises as `export_arrays` does."""
    reading = series.fresh()
    path.parent.mkdir(parents=True, exist_ok=True)
    records = list(reading.records)
    raw_nbytes = sum(_nbytes(reading, record) for record in records)
    write = partial(SUFFIXES[path.suffix], run_id=run_id, series=reading, records=records)
    return ExportedFile(path, write_new(path, write), len(records), raw_nbytes)


def _nbytes(series: Series, record: Record) -> int:
    return prod(record.shape) * ITEM_NBYTES[series.dtype]


def _description(run_id: str, series: Series, records: Sequence[Record]) -> str:
    document = {
        "format": _FORMAT,
        "run": run_id,
        "path": series.path,
        "key": msgspec.to_builtins(series.key),
        "dtype": series.dtype,
        "attributes": series.attributes,
        "records": [described(record) for record in records],
    }
    return json.dumps(document)


def described(record: Record) -> dict[str, Any]:
    """Return all that is known of a record except its elements and statistics, as plain values."""
    return {
        "record": record.index,
        "shape": list(record.shape),
        **{name: getattr(record, name) for name in Moment.__struct_fields__},
        "device": record.device,
        "requires_grad": record.requires_grad,
        "is_leaf": record.is_leaf,
        "metadata": record.metadata,
    }


def _write_npz(file: BinaryIO, run_id: str, series: Series, records: Sequence[Record]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        add_npy(archive, "capd", np.array(_description(run_id, series, records)))
        for record in records:
            add_npy(archive, str(record.index), series.read(record.index))


def add_npy(archive: zipfile.ZipFile, name: str, array: NDArray[Any]) -> None:
    """Add an array to the archive that an .npz file is."""
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
        npy_format.write_array(entry, array, allow_pickle=False)


# The header (JSON) and the raw bytes are written here: the safetensors library needs the whole series in memory.
def _write_safetensors(file: BinaryIO, run_id: str, series: Series, records: Sequence[Record]) -> None:
    kind = _SAFETENSORS.get(series.dtype, "U8")
    header: dict[str, Any] = {"__metadata__": {"capd": _description(run_id, series, records)}}
    end = 0
    for record in records:
        begin, end = end, end + _nbytes(series, record)
        header[str(record.index)] = {"dtype": kind, "shape": list(record.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # The tensors must begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_NBYTES:
        raise CapdError(
            f"{series.path} has too many records for one safetensors file ({len(records)}); export it as npz or pt"
        )
    file.write(struct.pack("<Q", len(text)) + text)
    for record in records:
        file.write(series.read(record.index).reshape(-1).view(np.uint8).data)


SUFFIXES: dict[str, Callable[..., None]] = {
    ".npz": _write_npz,
    ".safetensors": _write_safetensors,
}
