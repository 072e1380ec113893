"""Compares pairs of records on a cluster, as `capd.report.differences` does in one process."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from capd.analyze.difference import Difference
from capd.distributed.cluster.engine import Engine, LostTask
from capd.distributed.tasks.pairs import pair_results, pair_task, pair_tasks, run_pairs
from capd.errors import CapdError
from capd.io.items import Skipped
from capd.io.pairs import Pair
from capd.io.sides import Side
from capd.report.differences import Compared

__all__ = ["compared_on"]


def compared_on(engine: Engine, plan: str, left: Side, right: Side, task_nbytes: int) -> Compared:
    """Return what compares pairs on the workers, about `task_nbytes` of both sides in each task.

    `plan` is the identity under which workers keep the opened runs. ConfigError is raised for tensor files.
    """

    def compared(pairs: Sequence[Pair]) -> Generator[Difference | Skipped, None, None]:
        tasks = list(pair_tasks(pairs, task_nbytes))
        found = engine.ordered(run_pairs, (pair_task(plan, left, right, each) for each in tasks))
        for each, result in zip(tasks, found, strict=True):
            if isinstance(result, LostTask):
                yield from _one_by_one(engine, plan, left, right, each)
                continue
            differences = pair_results(result)
            if len(differences) != len(each):
                raise CapdError(f"a worker compared {len(differences)} of {len(each)} pairs")
            yield from differences

    return compared


def _one_by_one(
    engine: Engine, plan: str, left: Side, right: Side, pairs: Sequence[Pair]
) -> Iterator[Difference | Skipped]:
    """Yield the differences of pairs of which one killed its workers."""
    for pair in pairs:
        found = engine.alone(run_pairs, pair_task(plan, left, right, [pair]))
        if isinstance(found, LostTask):
            yield Skipped(f"{left.source}: {pair.left.name}", found.reason, damaged=True)
        else:
            yield from pair_results(found)
