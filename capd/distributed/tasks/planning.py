"""Cuts the records of a source into tasks of whole shards, about as large as asked."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from capd.distributed.tasks.question import Question
from capd.distributed.tasks.task import TaskPart, TaskPlan
from capd.errors import ConfigError, StoreError
from capd.io.items import NamedSeries
from capd.store.objects.address import RunPlace
from capd.store.read.store import open_store
from capd_client.config.sizes import parse_size
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.statistics_row import ROW_VALUES

__all__ = ["TASK_SIZES", "place_text", "planned", "size_of"]

TASK_SIZES = (1 << 10, 64 << 30)
"""The smallest and the largest size of tasks."""


def planned(
    series: Sequence[NamedSeries], question: Question, task_nbytes: int, attempt: int | str = "latest"
) -> TaskPlan:
    """Return the plan for the records of some series, in their order.

    Args:
        series: The series.
        question: What is asked.
        task_nbytes: The size of a task. A larger shard is divided. A larger record is a task of its own.
        attempt: As in `Store.find`, as the series were found.
    """
    tasks: list[list[TaskPart]] = []
    room, largest = 0, (0, "")
    ids: dict[str, str] = {}
    for named in series:
        largest = max(largest, (_largest(named), named.name), key=lambda one: one[0])
        place = place_text(named.series.run)
        if place not in ids:
            ids[place] = open_store(place).run_id
        for part in _parts(named, task_nbytes, attempt, ids[place]):
            if not tasks or part.bytes > room:
                tasks.append([])
                room = task_nbytes
            tasks[-1].append(part)
            room -= part.bytes
    return TaskPlan.of(question, tasks, largest)


def size_of(option: str, text: str, limits: tuple[int, int] = TASK_SIZES) -> int:
    """Return the bytes that an option names. Raises ConfigError if they are none, or beyond the limits."""
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if not limits[0] <= nbytes <= limits[1]:
        raise ConfigError(f"{option} {text} is not between 1KiB and 64GiB; 64MiB to 512MiB are good sizes")
    return nbytes


def place_text(place: str | RunPlace) -> str:
    """Return a run as tasks name it: an address as it is, a path from the root on, so that every process finds it."""
    text = str(place)
    return text if "://" in text else os.path.abspath(text)


def _largest(named: NamedSeries) -> int:
    one = named.series
    return prod(one.shape[1:]) * ITEM_NBYTES[one.dtype] if one.kept == "tensor" else 8 * ROW_VALUES


def _parts(named: NamedSeries, task_nbytes: int, attempt: int | str, run_id: str) -> Iterator[TaskPart]:
    one, numbers = named.series, named.numbers
    of = 0 if isinstance(numbers, StoreError) else len(numbers)
    shared: dict[str, Any] = {
        "run": place_text(one.run), "run_id": run_id, "series": one.path, "node": one.node, "attempt": attempt,
        "name": named.name, "turn": named.turn, "of": of, "place": tuple(named.first), "label": named.label,
    }  # fmt: skip
    if isinstance(numbers, StoreError):
        yield TaskPart(first=0, last=0, bytes=0, **shared)
        return
    if not numbers:
        return
    each = max(1, (one.raw_bytes if one.kept == "tensor" else 8 * ROW_VALUES * len(numbers)) // len(numbers))
    per_shard, most = one.header.geometry.shard_records, max(1, task_nbytes // each)
    for first, last in _pieces(numbers, per_shard, most):
        bounds = (numbers[first], numbers[last - 1])
        yield TaskPart(first=first, last=last, bytes=each * (last - first), numbers=bounds, **shared)


def _pieces(numbers: Sequence[int], per_shard: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the places of the records of each shard, and of parts of it if it has more than `most` records."""
    first = 0
    while first < len(numbers):
        end = bisect_left(numbers, (numbers[first] // per_shard + 1) * per_shard, first)
        for start in range(first, end, most):
            yield start, min(end, start + most)
        first = end
