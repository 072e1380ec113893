"""The run that is analysed, and one measurement of its analysis: in this process, or on workers of Dask."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.store.store_capd import CapdWriter, definition
from benchmarks.store.store_data import synthetic_records
from benchmarks.store.store_runner import Meter, Row
from capd.analyze.format_choice import choices
from capd.analyze.groups import Groups
from capd.distributed.cluster.gathering import gather_on
from capd.distributed.cluster.opening import opened_engine
from capd.distributed.cluster.settings import ClusterSettings
from capd.distributed.tasks.planning import planned
from capd.distributed.tasks.question import Question
from capd.distributed.tasks.task import TaskPlan
from capd.io.items import items_of_runs
from capd.report.gather import GatheredRecords, gather
from capd.server.heap import settled_heap

SHAPE = (1024, 2048)
RECORD_NBYTES = 2 * SHAPE[0] * SHAPE[1]
TASK_NBYTES = 64 << 20
FORMATS = "fp8,mxfp8,mxfp4,nvfp4,hifp8"


def prepare(root: str, records: int) -> Row:
    """Write a run of bfloat16 records of 4 MiB, eight series."""
    writer = CapdWriter(Path(root) / "run", threads=2, codec="default")
    batch = synthetic_records(min(records, 8), SHAPE)
    for number in range(records):
        data = memoryview(batch[number % len(batch)]).cast("B")
        writer.put(definition(number % 8), data, SHAPE, number)
    writer.close()
    return {"run": str(writer.run)}


def empty() -> GatheredRecords:
    """Return the groups of `capd compare --by tensor_name`, without records."""
    return GatheredRecords(groups=Groups({(): True, ("tensor_name",): True}))


def plan_of(run: str, task_nbytes: int) -> TaskPlan:
    """Return the tasks of the analysis."""
    series = items_of_runs([Path(run)], []).series
    assert series is not None
    return planned(series, Question.of(empty(), 1.0, choices=choices(FORMATS)), task_nbytes)


def here(run: str) -> Row:
    """Measure the analysis in one thread of this process."""
    import torch

    torch.set_num_threads(1)
    torch.ones(64, 64).to(torch.bfloat16).abs().amax()
    found = empty()
    with settled_heap(), Meter() as meter:
        for _ in gather(items_of_runs([Path(run)], []).found, found, threads=1, choices=choices(FORMATS)):
            pass
    return meter.row(workers_cpu_s=meter.cpu_s, sqnr_db=found.groups.whole().errors["mxfp8"].sqnr_db)


def there(run: str, workers: int, task_nbytes: int, settles_heap: bool) -> Row:
    """Measure the analysis on workers of Dask, which have started before."""
    plan, found = plan_of(run, task_nbytes), empty()
    settings = ClusterSettings(scheduler="processes", workers=workers, settles_heap=settles_heap)
    with opened_engine(settings, [run]) as engine:
        before = sum(engine.client.run(cpu_seconds).values())
        with Meter() as meter:
            for _ in gather_on(engine, plan, found):
                pass
        spent = sum(engine.client.run(cpu_seconds).values()) - before
    return meter.row(workers_cpu_s=spent, sqnr_db=found.groups.whole().errors["mxfp8"].sqnr_db)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process."""
    return sum(os.times()[:2])
