"""Writes the files of an export on a cluster, as `capd.pt_files.export` and `capd.io.arrays` do in one process.

The names of all files are found here, so that they are those of one process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

from capd.distributed.cluster.engine import Engine, LostTask
from capd.distributed.tasks.exports import (
    ExportPlan,
    array_task,
    file_sizes,
    record_task,
    run_arrays,
    run_records,
)
from capd.distributed.tasks.planning import place_text
from capd.errors import CapdError
from capd.io.arrays import array_path
from capd.output_directory import ExportedFile, locked_directory, remove_export_temporaries
from capd.pt_files.export import named_records
from capd.store.read.series import Record, Series
from capd_client.protocol.dtypes import ITEM_NBYTES

__all__ = ["export_arrays_on", "export_pt_on"]

_Named = tuple[Series, Record, Path]


def export_pt_on(
    engine: Engine, shared: ExportPlan, chosen: Sequence[Series], out: Path, task_nbytes: int
) -> Iterator[ExportedFile]:
    """Write every record of the chosen series to its own file. Yield each in order, when its task is done.

    Raises:
        CapdError: A worker does not see `out`, or killed itself over a record; and as `export_pt` does.
    """
    with _shared_directory(engine, out):
        groups = list(_groups(chosen, shared, out, task_nbytes))
        tasks = (
            record_task(shared, group[0][0], [(record.index, path) for _, record, path in group])
            for group in groups
        )
        for group, found in zip(groups, engine.ordered(run_records, tasks), strict=True):
            names = [path for _, _, path in group]
            for (series, record, path), nbytes in zip(group, _sizes(found, names), strict=True):
                yield ExportedFile(path, nbytes, 1, _raw_nbytes(series, record))


def export_arrays_on(
    engine: Engine, shared: ExportPlan, chosen: Sequence[Series], out: Path, suffix: str
) -> Iterator[ExportedFile]:
    """Write each of the chosen series to one file. Yield each in order. Raises as `export_pt_on` does."""
    with _shared_directory(engine, out):
        paths = [array_path(series, out, suffix) for series in chosen]
        for path in paths:
            if path.exists():
                raise CapdError(f"{path} exists already; export into another directory")
        tasks = (array_task(shared, series, path) for series, path in zip(chosen, paths, strict=True))
        for series, path, found in zip(chosen, paths, engine.ordered(run_arrays, tasks), strict=True):
            [nbytes] = _sizes(found, [path])
            reading = series.fresh()
            raw = sum(_raw_nbytes(reading, record) for record in reading.records)
            yield ExportedFile(path, nbytes, len(series), raw)


@contextlib.contextmanager
def _shared_directory(engine: Engine, out: Path) -> Iterator[None]:
    """Hold the directory, which all workers must see, and leave no temporary file of a killed one in it."""
    with locked_directory(out):
        for address, seen in engine.client.run(os.path.isdir, place_text(out)).items():
            if not seen:
                raise CapdError(
                    f"worker {address} does not see {out}; export into a directory that all workers share"
                )
        try:
            yield
        finally:
            remove_export_temporaries(out)


def _groups(
    chosen: Sequence[Series], shared: ExportPlan, out: Path, task_nbytes: int
) -> Iterator[Sequence[_Named]]:
    """Yield neighbouring records of one series, about as many bytes as a task has."""
    group: list[_Named] = []
    held = 0
    for named in named_records(chosen, out, shared.naming):
        nbytes = _raw_nbytes(named[0], named[1])
        if group and (named[0] is not group[0][0] or held + nbytes > task_nbytes):
            yield group
            group, held = [], 0
        group.append(named)
        held += nbytes
    if group:
        yield group


def _sizes(found: bytes | LostTask, paths: Sequence[Path]) -> list[int]:
    if isinstance(found, LostTask):
        raise CapdError(
            f"{paths[0]} cannot be written: {found.reason}; the files in {paths[0].parent} are whole"
        )
    return file_sizes(found)


def _raw_nbytes(series: Series, record: Record) -> int:
    return prod(record.shape) * ITEM_NBYTES[series.dtype]
