"""Files of an export as a task: some records as `.pt` files, or one series as a file of arrays.

A task that runs again finds files that it wrote before. They are whole, because a file has its name only then.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from capd.analyze.packed.codec import pack, unpack
from capd.distributed.tasks.planning import place_text
from capd.distributed.tasks.reading import series_of
from capd.io.arrays import write_arrays
from capd.pt_files.dictionary import Naming
from capd.pt_files.export import write_record
from capd.store.read.series import Series

__all__ = ["ExportPlan", "array_task", "file_sizes", "record_task", "run_arrays", "run_records"]


class ExportPlan(NamedTuple):
    """What the tasks of an export share.

    Attributes:
        plan: The identity under which workers keep the opened run.
        run_id: The id of the run, as files name it.
        attempt: As in `Store.find`.
    """

    plan: str
    run_id: str
    attempt: int | str
    naming: Naming


class _SeriesPlace(NamedTuple):
    run: str
    node: str
    path: str


class _FileTask(NamedTuple):
    shared: ExportPlan
    series: _SeriesPlace
    # The number of the record and the path of its file; or the path of the only file.
    files: list[tuple[int, str]]


def record_task(shared: ExportPlan, series: Series, files: Sequence[tuple[int, Path]]) -> bytes:
    """Return the task that writes some records of a series, each to its `.pt` file."""
    return _task(shared, series, [(number, str(path)) for number, path in files])


def array_task(shared: ExportPlan, series: Series, path: Path) -> bytes:
    """Return the task that writes a series to one file of arrays."""
    return _task(shared, series, [(0, str(path))])


def _task(shared: ExportPlan, series: Series, files: list[tuple[int, str]]) -> bytes:
    place = _SeriesPlace(place_text(series.run), series.node, series.path)
    absolute = [(number, place_text(path)) for number, path in files]
    return pack(_FileTask(shared, place, absolute), _FileTask)


def run_records(task: bytes) -> bytes:
    """Run a task of `record_task`."""
    shared, place, files = unpack(task, _FileTask)
    series = series_of(shared.plan, shared.attempt, *place)
    sizes = []
    for number, name in files:
        path = Path(name)
        if not path.exists():
            write_record(shared.run_id, series, series.record(number), path, shared.naming)
        sizes.append(path.stat().st_size)
    return pack(sizes, list[int])


def run_arrays(task: bytes) -> bytes:
    """Run a task of `array_task`."""
    shared, place, [(_, name)] = unpack(task, _FileTask)
    path = Path(name)
    if not path.exists():
        write_arrays(shared.run_id, series_of(shared.plan, shared.attempt, *place), path)
    return pack([path.stat().st_size], list[int])


def file_sizes(found: bytes) -> list[int]:
    """Return the sizes of the files that a task wrote. Raises Damaged if it is nothing of that."""
    sizes: list[int] = unpack(found, list[int])
    return sizes
