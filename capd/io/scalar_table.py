"""Writes the scalars of a run as one CSV table, whose numbers give the same float64 again."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from capd.errors import DamagedRecord
from capd.io.items import Skipped, skipped
from capd.output_directory import ExportedFile, locked_directory, write_new
from capd.store.read.scalars import Scalar
from capd.store.read.store import Store
from capd_client.process.text import printable
from capd_client.protocol.scalars import scalar_key

__all__ = ["SCALAR_TABLE_NAME", "ReadableScalars", "export_scalars", "readable_scalars"]

SCALAR_TABLE_NAME = "scalars.csv"
_COLUMNS = ("name", "rank", "iteration", "micro_batch", "call", "time_ns", "value")


class ReadableScalars(NamedTuple):
    """The scalars of a selection that could be read, and those that could not, with the reasons."""

    found: list[Scalar]
    skipped: list[Skipped]


def readable_scalars(
    store: Store, tests: Sequence[Callable[[Any], bool]] = (), attempt: int | str = "latest"
) -> ReadableScalars:
    """Read the scalars of all ranks whose keys pass all tests. A damaged one is skipped. attempt: as in `find`."""
    read = ReadableScalars([], [])
    for name, ranks in store.scalars().items():
        for rank in ranks:
            if all(test(scalar_key(name, rank)) for test in tests):
                try:
                    found = store.scalar(name, rank=rank, attempt=attempt)
                    # A rank may have recorded it in other attempts only.
                    if len(found):
                        read.found.append(found)
                except DamagedRecord as error:
                    read.skipped.append(
                        skipped(f"scalar {printable(name)} of rank {rank}", error, damaged=True)
                    )
    return read


def export_scalars(scalars: Sequence[Scalar], out: Path) -> ExportedFile:
    """Write `out/scalars.csv`.

    Raises:
        CapdError: If the file exists.
        StoreBusy: If another export writes to `out`.
        OSError: If the file cannot be written.
    """
    with locked_directory(out):
        path = out / SCALAR_TABLE_NAME
        nbytes = write_new(path, lambda file: _write(file, scalars))
    records = sum(map(len, scalars))
    return ExportedFile(path, nbytes, records, 8 * records)


def _write(file: BinaryIO, scalars: Sequence[Scalar]) -> None:
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    table = csv.writer(text, lineterminator="\n")
    table.writerow(_COLUMNS)
    for one in scalars:
        columns = (one.iterations, one.micro_batches, one.calls, one.times.view("int64"), one.values)
        for row in zip(*(column.tolist() for column in columns), strict=True):
            table.writerow((one.name, one.rank, *row))
    text.detach()
