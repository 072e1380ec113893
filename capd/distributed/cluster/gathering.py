"""Gathers the records of a plan on a cluster, as `capd.report.gather` does in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from capd.distributed.cluster.engine import Engine, Job, LostTask
from capd.distributed.cluster.tree import MergeTree
from capd.distributed.tasks.partial import finished
from capd.distributed.tasks.products import call_bytes, call_result, run_call
from capd.distributed.tasks.reading import reader_of
from capd.distributed.tasks.running import merge_partials, partial_of_parts, partial_without, run_task
from capd.distributed.tasks.task import AnalysisTask, TaskPlan
from capd.io.items import Skipped
from capd.report.gather import GatheredRecords, finish
from capd.report.products.linear_calls import Call
from capd.report.products.product_errors import Result

if TYPE_CHECKING:
    from capd.distributed.cluster.checkpoint import Checkpoint

__all__ = ["gather_on", "run_parts"]


def gather_on(
    engine: Engine, plan: TaskPlan, gathered: GatheredRecords, *, checkpoint: Checkpoint | None = None
) -> Iterator[Skipped | int]:
    """Add all records of a plan to `gathered`, which is empty. All are added when the iterator ends.

    Yields:
        The bytes of each task that is done, then for each record that was left out the reason.

    Raises:
        CapdError: A task failed for another reason than the death of its workers, or the cluster is gone.
    """
    work = _Work(engine, plan, checkpoint)
    yield from work.done()
    yield from work.run()
    # Nothing else runs now, so that a worker that dies tells on the task that killed it.
    for task in work.lost:
        # A checkpoint does not keep it: the next call may have workers with more memory.
        work.put((0, task.task), partial_of_parts(task, run_parts(engine, task)), keep=False)
        yield task.bytes
    yield from work.run()
    if work.tree.root is not None:
        gathered.extend(finished([work.tree.root], len(plan.tasks)))
    if gathered.calls is not None:
        gathered.calls.read_by(partial(reader_of, plan.identity))
    yield from gathered.skipped
    yield from finish(gathered, partial(_measured, engine, plan) if plan.question.formats else None)


class _Work:
    """The tasks of a plan and the merges of their results.

    Results come back here, so that the death of a worker costs the tasks that it runs alone. Merges run on workers.
    """

    def __init__(self, engine: Engine, plan: TaskPlan, checkpoint: Checkpoint | None) -> None:
        self._engine, self._plan, self._checkpoint = engine, plan, checkpoint
        self.tree, self.lost = MergeTree(len(plan.tasks)), list[AnalysisTask]()
        self._ready: deque[Job] = deque()
        kept = frozenset() if checkpoint is None else checkpoint.tasks
        self._rest = (
            Job((0, task.task), run_task, msgspec.json.encode(task))
            for task in plan.tasks
            if task.task not in kept
        )

    def done(self) -> Iterator[int]:
        """Take what the checkpoint has. Yield the bytes of each task."""
        if self._checkpoint is not None:
            for number in sorted(self._checkpoint.tasks & set(range(len(self._plan.tasks)))):
                self.put((0, number), self._checkpoint.result(number), keep=False)
                yield self._plan.tasks[number].bytes

    def run(self) -> Iterator[int]:
        """Run what is there to run. Yield the bytes of each task that is done. `lost` has those that are not."""
        for job, found in self._engine.unordered(self._take):
            level, place = job.place
            if level:
                # What could not be merged there is merged here.
                self.put(job.place, merge_in_order(job.argument) if isinstance(found, LostTask) else found)
            elif isinstance(found, LostTask):
                self.lost.append(self._plan.tasks[place])
            else:
                self.put(job.place, found)
                yield self._plan.tasks[place].bytes

    def put(self, place: tuple[int, int], result: bytes, *, keep: bool = True) -> None:
        """Add the result of a task or a merge. `keep`: whether it enters the checkpoint, if it is a task's."""
        if keep and place[0] == 0 and self._checkpoint is not None:
            self._checkpoint.add(place[1], result)
        group = self.tree.add(*place, result)
        if group is not None:
            self._ready.append(Job((group.level, group.place), merge_in_order, group.results))

    def _take(self) -> Job | None:
        return self._ready.popleft() if self._ready else next(self._rest, None)


def run_parts(engine: Engine, task: AnalysisTask) -> Iterator[bytes]:
    """Run the parts of a task one by one. Those whose workers die are left out with the reason."""
    for part in task.each_part():
        found = engine.alone(run_task, msgspec.json.encode(part))
        yield partial_without(part, found.reason) if isinstance(found, LostTask) else found


def merge_in_order(partials: Sequence[bytes]) -> bytes:
    """Merge the partial results of neighbouring tasks. It runs on a worker."""
    return merge_partials(partials)


def _measured(engine: Engine, plan: TaskPlan, calls: Sequence[Call]) -> Iterable[Result]:
    """Measure the calls of linear layers on the workers. Yield the result of each, in order."""
    tasks = (call_bytes(plan.identity, plan.question.formats, call) for call in calls)
    for call, found in zip(calls, engine.ordered(run_call, tasks), strict=True):
        if isinstance(found, LostTask):
            yield Skipped(f"product of {call.x.name}", found.reason)
        else:
            yield call_result(found)
