"""The check of some shards as a task: the promises of their series are read where it runs, before the shards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from capd.distributed.tasks.codec import pack, unpack
from capd.store.verify.damage import Damage, Report
from capd.store.verify.node import NodePromise, look_at_node
from capd.store.verify.run import Shard, all_ids, check_twice, run_identity
from capd.store.verify.series import promise_of

__all__ = ["check_task", "reports_of", "run_checks"]


class _CheckTask(NamedTuple):
    plan: str
    run: str
    shards: list[tuple[str, int]]


class _Findings(NamedTuple):
    records: int
    nbytes: int
    damaged: list[Damage]
    notes: list[str]


def check_task(plan: str, run: str, shards: Sequence[Shard]) -> bytes:
    """Return the task that checks some shards of a run."""
    return pack(_CheckTask(plan, run, [(one.path, one.number) for one in shards]), _CheckTask)


def run_checks(task: bytes) -> bytes:
    """Run a task of `check_task`."""
    plan, place, shards = unpack(task, _CheckTask)
    run, found = Path(place), []
    ids, nodes = _nodes(place, plan)
    for path, number in shards:
        promise, metadata = promise_of(run, ids, path, nodes)
        # The metadata is reported where the task was made.
        report = Report(run) if promise is None else check_twice(Shard(promise, number))
        if promise is None and not metadata.damaged:
            report.find("shard", run / path, f"shard {number} is gone", series=path)
        found.append(_Findings(report.records, report.nbytes, report.damaged, report.notes))
    return pack(found, list[_Findings])


def reports_of(found: bytes, run: Path) -> list[Report]:
    """Return what `run_checks` found in each shard. Raises Damaged if it is nothing of that."""
    findings: list[_Findings] = unpack(found, list[_Findings])
    return [Report(run, 0, one.records, one.nbytes, one.damaged, one.notes) for one in findings]


@lru_cache(4)
def _nodes(place: str, plan: str) -> tuple[frozenset[str], list[NodePromise]]:
    """Return what the nodes of a run promise. They are read once for each plan."""
    run = Path(place)
    ids = all_ids(run, run_identity(run, Report(run)))
    return ids, [look_at_node(run, directory, ids) for directory in sorted((run / ".capd").glob("node=*"))]
