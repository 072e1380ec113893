"""Writes records as tensor_saver's files, which plain torch.load(weights_only=True) reads.

Each quant type has a directory, as tensor_saver lays it out. Files get their names in the order of the series and their
records. Each large record is read and written by one of a few threads. About 128 MiB of records are in memory at once,
or one record if it is larger.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from capd.ahead import ahead, worker_threads
from capd.output_directory import ExportedFile, locked_directory, write_new
from capd.pt_files.dictionary import Naming, dictionary_of
from capd.pt_files.names import file_name, name_parts, stamp_of
from capd.store.documents.names import component
from capd.store.read.series import Record, Series, tensor_of
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.key import Moment

__all__ = ["export_pt", "named_records", "save_object", "write_record"]

# A smaller record is mostly work of Python, so threads would only wait for each other.
_WORTH_A_THREAD_NBYTES = 256 << 10


def export_pt(
    run_id: str, chosen: Sequence[Series], out: Path, naming: Naming, *, threads: int
) -> Iterator[ExportedFile]:
    """Write every record of the chosen series, which keep tensors, to its own file below `out`.

    No existing file is replaced.

    Yields:
        Each file when it is whole.

    Raises:
        StoreBusy: If another export writes to `out`.
        DamagedRecord: If a record cannot be read exactly.
        OSError: If a file cannot be written.
    """
    with locked_directory(out), worker_threads(threads, "export") as pool:

        def begin(named: tuple[Series, Record, Path]) -> Callable[[], int]:
            write = partial(write_record, run_id, *named, naming)
            if _nbytes(named) >= _WORTH_A_THREAD_NBYTES:
                return pool.submit(write).result
            written = write()
            return lambda: written

        for named, done in ahead(named_records(chosen, out, naming), begin, _nbytes):
            yield ExportedFile(named[2], done(), 1, _nbytes(named))


def named_records(
    chosen: Sequence[Series], out: Path, naming: Naming
) -> Iterator[tuple[Series, Record, Path]]:
    """Yield the records of series in the order of their files, each with its series and the path of its file."""
    names = _Names(naming, out)
    for series, record in _in_order(chosen):
        yield series, record, names.path(series, record)


def write_record(run_id: str, series: Series, record: Record, path: Path, naming: Naming) -> int:
    """Write a record to a new file and return its size. Raises as `export_pt` does."""
    bits = series.read(record.index)
    tensor = tensor_of(bits, series.dtype)
    found = dictionary_of(run_id, series, record, bits, tensor, naming)
    return write_new(path, partial(save_object, found))


def _in_order(chosen: Sequence[Series]) -> Iterator[tuple[Series, Record]]:
    """Yield the records series by series, in the order in which the series began.

    An import in the order of counters then creates each key's series in the order of the original run.
    """
    # If variants began at one time, the variant with the shorter path (`~v2` before `~v10`) is older.
    for series in sorted(chosen, key=lambda s: (s.fresh().record(0).time_ns, len(s.path), s.path)):
        reading = series.fresh()
        for record in reading.records:
            yield reading, record


def _nbytes(named: tuple[Series, Record, Path]) -> int:
    series, record, _ = named
    return prod(record.shape) * ITEM_NBYTES[series.dtype]


class _Names:
    def __init__(self, naming: Naming, out: Path) -> None:
        self._naming, self._out = naming, out
        # The last counter in each directory.
        self._counters: dict[Path, int] = {}
        self._series: Series | None = None
        self._stamp = ""

    def path(self, series: Series, record: Record) -> Path:
        """Return the path of the next record's file."""
        if series is not self._series:
            self._series, self._stamp = series, ""
        # If the clock was set back, the names must still keep the order.
        self._stamp = max(self._stamp, stamp_of(record.time_ns))
        key, naming = series.key, self._naming
        directory, counter = self._place(key.quant_type)
        moment = Moment(**{name: getattr(record, name) for name in Moment.__struct_fields__})
        return directory / file_name(
            naming.scheme, naming.shown(key), moment, naming.layer(key), self._stamp, counter
        )

    def _place(self, quant_type: str) -> tuple[Path, int]:
        """Return the directory of a quant type and the next counter in it, larger than all that are there."""
        directory = self._out / component(quant_type)
        if directory not in self._counters:
            directory.mkdir(exist_ok=True)
            known = (name_parts(name) for name in os.listdir(directory))
            self._counters[directory] = max((parts.counter for parts in known if parts), default=0)
        self._counters[directory] += 1
        return directory, self._counters[directory]


def save_object(found: Any, file: BinaryIO) -> None:
    """Write an object with torch.save. Raises OSError if the file cannot be written."""
    import torch

    try:
        torch.save(found, file)
    except RuntimeError as error:
        # After a failed write torch closes its archive and raises only that second error.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
