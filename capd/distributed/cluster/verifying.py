"""Checks the shards of a run on a cluster, as `capd.store.verify.run` does in one process."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Union

from capd.distributed.cluster.engine import Engine, LostTask
from capd.distributed.tasks.planning import place_text
from capd.distributed.tasks.shards import check_task, reports_of, run_checks
from capd.errors import CapdError
from capd.store.objects.address import RunPlace
from capd.store.verify.damage import Report
from capd.store.verify.run import Check, CheckEach, Shard

__all__ = ["checks_on"]

_MOST_SHARDS = 4096
# What is checked here, or a task.
_Step = Union[Report, Sequence[Shard]]


def checks_on(engine: Engine, place: RunPlace, task_nbytes: int, run: Path) -> CheckEach:
    """Return what checks shards on the workers.

    Args:
        engine: The cluster.
        place: The run as workers find it: a directory or an address.
        task_nbytes: The bytes of files in each task, about.
        run: The directory with the metadata of the run, which is checked here.
    """

    def check_each(checks: Iterable[Check]) -> Iterator[Report]:
        plan, named = uuid.uuid4().hex, place_text(place)
        steps = list(_steps(checks, task_nbytes))
        tasks = (check_task(plan, named, step) for step in steps if not isinstance(step, Report))
        results = engine.ordered(run_checks, tasks)
        for step in steps:
            if isinstance(step, Report):
                yield step
                continue
            found = next(results)
            if isinstance(found, LostTask):
                yield from _one_by_one(engine, plan, named, run, step)
                continue
            reports = reports_of(found, run)
            if len(reports) != len(step):
                raise CapdError(f"a worker checked {len(reports)} of {len(step)} shards")
            yield from reports

    return check_each


def _steps(checks: Iterable[Check], task_nbytes: int) -> Iterator[_Step]:
    shards: list[Shard] = []
    held = 0
    for check in checks:
        if isinstance(check, Report):
            yield check
            continue
        nbytes = check.nbytes
        if shards and (held + nbytes > task_nbytes or len(shards) >= _MOST_SHARDS):
            yield shards
            shards, held = [], 0
        shards.append(check)
        held += nbytes
    if shards:
        yield shards


def _one_by_one(
    engine: Engine, plan: str, place: str, run: Path, shards: Sequence[Shard]
) -> Iterator[Report]:
    """Check shards of which one killed its workers."""
    for shard in shards:
        found = engine.alone(run_checks, check_task(plan, place, [shard]))
        if isinstance(found, LostTask):
            report = Report(run)
            what = f"shard {shard.number} cannot be checked: {found.reason}"
            report.find("shard", run / shard.path, what, series=shard.path, node=shard.promise.node)
            yield report
        else:
            yield from reports_of(found, run)
