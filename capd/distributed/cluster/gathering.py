"""Gathers the records of a plan on a cluster, as `capd.report.gather` does in one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from capd.distributed.cluster.engine import Engine, LostTask
from capd.distributed.cluster.tree import MergeTree
from capd.distributed.tasks.partial import finished
from capd.distributed.tasks.products import call_bytes, call_result, run_call
from capd.distributed.tasks.reading import reader_of
from capd.distributed.tasks.running import merge_partials, partial_of_parts, partial_without, run_task
from capd.distributed.tasks.task import Plan, Task
from capd.errors import CapdError
from capd.io.items import Skipped
from capd.report.gather import GatheredRecords, finish
from capd.report.products.linear_calls import Call
from capd.report.products.product_errors import Result

if TYPE_CHECKING:
    from capd.distributed.cluster.checkpoint import Checkpoint

__all__ = ["gather_on", "run_parts"]


def gather_on(
    engine: Engine, plan: Plan, gathered: GatheredRecords, *, checkpoint: Checkpoint | None = None
) -> Iterator[Skipped | int]:
    """Add all records of a plan to `gathered`, which is empty. All are added when the iterator ends.

    Yields:
        The bytes of each task that is done, then for each record that was left out the reason.

    Raises:
        CapdError: A task failed for another reason than the death of its workers, or the cluster is gone.
    """
    tree: MergeTree[Any] = MergeTree(len(plan.tasks), partial(engine.submit, merge_in_order))
    done = frozenset() if checkpoint is None else checkpoint.tasks
    for number in sorted(done):
        tree.add(number, checkpoint.result(number) if checkpoint is not None else b"")
        yield plan.tasks[number].bytes
    rest = ((task.task, msgspec.json.encode(task)) for task in plan.tasks if task.task not in done)
    lost: list[Task] = []
    for number, future in engine.unordered(run_task, rest):
        task = plan.tasks[number]
        found = None
        if checkpoint is not None or future.status != "finished":
            found = engine.outcome(future)
        if isinstance(found, LostTask):
            lost.append(task)
            continue
        if checkpoint is not None and found is not None:
            checkpoint.add(number, found)
        tree.add(number, future)
        yield task.bytes
    # Nothing else runs now, so that a worker that dies tells on the task that killed it.
    for task in lost:
        result = partial_of_parts(task, run_parts(engine, task))
        tree.add(task.task, result)
        yield task.bytes
    _end(engine, plan, gathered, tree.root)
    yield from gathered.skipped
    products = finish(gathered, partial(_measured, engine, plan) if plan.question.formats else None)
    yield from products


def run_parts(engine: Engine, task: Task) -> Iterator[bytes]:
    """Run the parts of a task one by one. Those whose workers die are left out with the reason."""
    for part in task.each_part():
        found = engine.alone(run_task, msgspec.json.encode(part))
        yield partial_without(part, found.reason) if isinstance(found, LostTask) else found


def merge_in_order(partials: Sequence[bytes]) -> bytes:
    """Merge the partial results of neighbouring tasks. It runs on a worker."""
    return merge_partials(partials)


def _end(engine: Engine, plan: Plan, gathered: GatheredRecords, root: Any) -> None:
    if root is None:
        return
    whole = root if isinstance(root, bytes) else engine.outcome(root)
    if isinstance(whole, LostTask):
        raise CapdError(f"the results of the tasks could not be merged: {whole.reason}")
    gathered.extend(finished([whole], len(plan.tasks)))
    if gathered.calls is not None:
        gathered.calls.read_by(partial(reader_of, plan.identity))


def _measured(engine: Engine, plan: Plan, calls: Sequence[Call]) -> Iterable[Result]:
    """Measure the calls of linear layers on the workers. Yield the result of each, in order."""
    tasks = (call_bytes(plan.identity, plan.question.formats, call) for call in calls)
    for call, found in zip(calls, engine.ordered(run_call, tasks), strict=True):
        if isinstance(found, LostTask):
            yield Skipped(f"product of {call.x.name}", found.reason)
        else:
            yield call_result(found)
