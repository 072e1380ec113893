"""Runs tasks and merges their partial results, in any engine.

`capd plan-tasks RUN --json` prints the tasks, `capd.run_task` runs one wherever the run can be read, and
`capd.merge_partials` merges what they return, in any order. A task may run more than once, and counts once.

With Ray:

    import json, subprocess, capd, ray
    plan = json.loads(subprocess.check_output(["capd", "plan-tasks", "/shared/run.zarr", "--json"]))
    run = ray.remote(num_cpus=1, max_retries=3)(capd.run_task)
    partial = capd.merge_partials(ray.get([run.remote(task) for task in plan["tasks"]]))
    capd.partial_document(partial)["all"]["errors"]

With Spark:

    tasks = spark.sparkContext.parallelize(plan["tasks"], len(plan["tasks"]))
    partials = tasks.map(capd.run_task).glom().map(lambda some: capd.merge_partials(some, whole=False))
    partial = capd.merge_partials(one for some in partials.collect() for one in some)

`capd.errors_of_partial(partial)` has the errors of each group, as `capd compare --json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, overload

from capd.distributed.tasks.partial import (
    TaskSpan,
    found_in_partial,
    head_of,
    merged,
    pack_partial,
    question_of,
)
from capd.distributed.tasks.reading import items_of_task
from capd.distributed.tasks.task import AnalysisTask, task_of
from capd.errors import CapdError
from capd.report.gather import gather_part

__all__ = ["merge_partials", "partial_document", "partial_of_parts", "partial_without", "run_task"]


def run_task(task: AnalysisTask | Mapping[str, Any] | str | bytes) -> bytes:
    """Read the records of one task, measure them, and return the partial result.

    Args:
        task: A task of `capd plan-tasks --json`: as text, or as what its JSON contains.

    Returns:
        The partial result, which holds no element: some 100 KiB for each grouping. The same task gives the same bytes.

    Raises:
        ConfigError: It is no task.
        StoreError: The run cannot be opened, or is not what it was when the task was planned.
    """
    one = task_of(task)
    found, measured = one.question.gathered(), one.question.measured
    if one.question.formats:
        import torch

        # Tasks run side by side. Torch's threads would wait for each other.
        torch.set_num_threads(1)
    for _ in gather_part(items_of_task(one), found, threads=1, **measured):
        pass
    return pack_partial(_place(one), one.question, found)


@overload
def merge_partials(partials: Iterable[bytes], *, whole: Literal[True] = ...) -> bytes: ...
@overload
def merge_partials(partials: Iterable[bytes], *, whole: Literal[False]) -> list[bytes]: ...


def merge_partials(partials: Iterable[bytes], *, whole: bool = True) -> bytes | list[bytes]:
    """Merge partial results of one plan, in any order. What is given twice counts once.

    Args:
        partials: The results of tasks, or of earlier merges.
        whole: Whether they must be of neighbouring tasks, without a gap between them.

    Returns:
        The partial result of all. Without `whole`, one for each run of neighbouring tasks, in order.

    Raises:
        CapdError: There are none, or of several plans, or two share some tasks but not all; or some are missing.
    """
    found = merged(partials)
    if not whole:
        return found
    if len(found) != 1:
        heads = ", ".join(f"{head.first}-{head.last - 1}" for head in map(head_of, found)) or "none"
        raise CapdError(f"partial results between others are missing; there are those of tasks {heads}")
    return found[0]


def partial_of_parts(task: AnalysisTask, partials: Iterable[bytes]) -> bytes:
    """Return the partial result of a task from those of its parts, in order."""
    found = task.question.gathered()
    for one in partials:
        found.extend(found_in_partial(one))
    return pack_partial(_place(task), task.question, found)


def partial_without(task: AnalysisTask, reason: str) -> bytes:
    """Return the partial result of a task whose records cannot be read, for a reason."""
    from capd.io.items import Skipped

    found = task.question.gathered()
    found.skipped += [Skipped(part.shown, reason, damaged=True) for part in task.parts]
    return pack_partial(_place(task), task.question, found)


def partial_document(partial: bytes) -> dict[str, Any]:
    """Return a partial result as plain values: what `capd compare --json` prints, without the products of layers.

    Raises:
        CapdError: It is no partial result.
    """
    from capd.report.format_errors import error_document
    from capd.report.gather import finish
    from capd.report.verdict_document import verdict_document

    found, question = found_in_partial(partial), question_of(partial)
    finish(found, None)
    fields, _ = question.groupings[-1]
    document = error_document([], found, question.choices, fields)
    return {**document, "verdict": verdict_document(found, question.choices)}


def _place(task: AnalysisTask) -> TaskSpan:
    return TaskSpan(task.plan, task.task, task.task + 1)
