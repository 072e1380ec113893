"""The records of a task, in a process that keeps the runs it opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capd.distributed.tasks.task import AnalysisTask, TaskPart
from capd.errors import StoreError
from capd.io.beside import labelled
from capd.io.items import Item, NamedSeries, SourcePlace, items_of
from capd.store.read.series import Series
from capd.store.read.store import open_store

__all__ = ["Reference", "items_of_task", "reader_of", "run_identity_of", "series_of"]

Reference = tuple[str, str, str, int]
# The runs that a process keeps opened.
_MOST_RUNS = 16


def items_of_task(task: AnalysisTask) -> Iterator[Item]:
    """Yield the records of a task. Raises StoreError if a run is not what it was when the task was planned."""
    kept: dict[tuple[str, ...], Series] = {}
    for part in task.parts:
        run_id, opened = _opened(part.run, task.plan, part.attempt)
        if run_id != part.run_id:
            raise StoreError(f"{part.run} is run {run_id}, no longer {part.run_id}; plan the tasks again")
        place = (part.run, part.node, part.series)
        if place[1:] not in opened:
            raise StoreError(f"{part.run} has no series {part.series} any more; plan the tasks again")
        # What is read through a fresh series is freed with the task.
        series = kept.setdefault(place, opened[place[1:]].fresh())
        items = items_of(_named(part, series), task.question.share, part.first, part.last)
        yield from (labelled(part.label, item) for item in items) if part.label else items


def _named(part: TaskPart, series: Series) -> NamedSeries:
    numbers: Any
    try:
        numbers = series.numbers[: part.of] if part.numbers else series.numbers
    except StoreError as error:
        numbers = error
    if part.numbers and not isinstance(numbers, StoreError):
        held = len(numbers) >= part.of and (numbers[part.first], numbers[part.last - 1])
        if held != (part.numbers[0], part.numbers[-1]):
            raise StoreError(
                f"{part.run}: series {part.series} has other records than when it was planned; plan the tasks again"
            )
    return NamedSeries(part.name, series, numbers, part.turn, SourcePlace(*part.place), part.label)


@lru_cache(_MOST_RUNS)
def _opened(run: str, plan: str, attempt: int | str) -> tuple[str, Mapping[tuple[str, str], Series]]:
    """Return the id of a run, and its series by node and path. It is opened once for each plan."""
    store = open_store(run)
    return store.run_id, {(one.node, one.path): one for one in store.find(attempt=attempt)}


def reader_of(plan: str, reference: Reference) -> partial[NDArray[np.generic]]:
    """Return the function that reads the elements of the record with this reference (`Item.reference`)."""
    return partial(_read, plan, reference)


def _read(plan: str, reference: Reference) -> NDArray[np.generic]:
    run, node, path, number = reference
    return series_of(plan, "all", run, node, path).read(number)


def series_of(plan: str, attempt: int | str, run: str, node: str, path: str) -> Series:
    """Return a series with empty caches. Raises StoreError if the run does not have it any more."""
    series = _opened(run, plan, attempt)[1].get((node, path))
    if series is None:
        raise StoreError(f"{run} has no series {path} any more")
    return series.fresh()


def run_identity_of(run: str) -> tuple[str, int]:
    """Return the id of a run and the number of its records, as this process sees them."""
    store = open_store(run)
    return store.run_id, sum(len(series) for series in store.find(attempt="all"))
