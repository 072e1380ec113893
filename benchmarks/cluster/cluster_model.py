"""Predicts the time of an analysis on up to 1,024 workers from constants that are measured here.

    python benchmarks/cluster/cluster_model.py [--mb N] [--rounds N] [--json FILE]

The constants are measured in the same run: MB/s of a worker (of one alone, and of two side by side, which share what a
machine has), seconds of the scheduler per task, seconds of a merge, MB/s of the store, and the spread of equal tasks.
A list-scheduling simulation (`simulation.py`) predicts the time of 1 and of 2 workers, which are measured, too. Then it
predicts 10 TB and 1 TB in tasks of 512 MiB. That is a prediction: nobody has measured it.

must: predicted over measured between 0.75 and 1.25 at 1 and at 2 workers.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cluster.gathering import RECORD_NBYTES, TASK_NBYTES, plan_of
from benchmarks.cluster.simulation import Constants, simulated_s
from benchmarks.store.store_runner import (
    Row,
    child,
    interleave,
    medians,
    memory_directory,
    options,
    report,
    table,
    verdict,
    work_directory,
)
from capd.distributed.cluster.opening import opened_engine
from capd.distributed.cluster.settings import ClusterSettings
from capd.distributed.cluster.tree import FAN_IN
from capd.distributed.tasks.running import merge_partials, run_task
from capd.server.heap import settle_heap

NEAR = 0.25
EMPTY_TASKS = 300
MODULE = "benchmarks.cluster.cluster_model"
WORKERS = (1, 2, 4, 16, 64, 256, 1024)
STORE_RATE = 20e9
"""The assumed speed of a cluster's store, in bytes a second. It cannot be measured here."""


def measured_alone(run: str, task_nbytes: int, side_by_side: int) -> Row:
    """Measure tasks in processes without Dask: the rate of each process, the spread, the time of a merge."""
    plan = plan_of(run, task_nbytes)
    tasks = [msgspec.json.encode(task) for task in plan.tasks]
    with multiprocessing.get_context("spawn").Pool(side_by_side, _begin) as pool:
        pool.map(_warm, [tasks[0]] * side_by_side, 1)
        spent = pool.map(_timed, tasks, 1)
    seconds, results = [one for one, _ in spent], [result for _, result in spent]
    begin = time.perf_counter()
    merge_partials((results * FAN_IN)[:FAN_IN] if len(results) < FAN_IN else results[:FAN_IN])
    return {
        "rate": plan.nbytes / sum(seconds),
        "spread": statistics.stdev(seconds) / statistics.mean(seconds) if len(seconds) > 1 else 0.0,
        "merge_s": time.perf_counter() - begin,
    }


def _begin() -> None:
    settle_heap()


def _warm(task: bytes) -> None:
    run_task(task)


def _timed(task: bytes) -> tuple[float, bytes]:
    begin = time.perf_counter()
    found = run_task(task)
    return time.perf_counter() - begin, found


def measured_scheduler(run: str) -> Row:
    """Measure the time that client and scheduler take for an empty task, among many."""
    with opened_engine(ClusterSettings(scheduler="processes", workers=1), [run]) as engine:
        begin = time.perf_counter()
        running = [engine.submit(msgspec.json.encode, number) for number in range(EMPTY_TASKS)]
        for one in running:
            engine.outcome(one)
        return {"task_s": (time.perf_counter() - begin) / EMPTY_TASKS}


def measured_store(run: str) -> Row:
    """Measure how fast the files of the run are read."""
    files = [path for path in Path(run).rglob("*") if path.is_file()]
    begin = time.perf_counter()
    nbytes = sum(len(path.read_bytes()) for path in files)
    return {"store_rate": nbytes / (time.perf_counter() - begin)}


def curve(known: Constants, nbytes: float, task_nbytes: float) -> list[dict[str, Any]]:
    """Return the predicted hours and speedup for each number of workers."""
    tasks = round(nbytes / task_nbytes)
    seconds = {workers: simulated_s(known, workers, tasks, task_nbytes) for workers in WORKERS}
    return [
        {"workers": workers, "hours": one / 3600, "speedup": seconds[1] / one}
        for workers, one in seconds.items()
    ]


def measured(run: str, task_nbytes: int, rounds: int) -> dict[str, Row]:
    """Return the medians of everything that is measured, over interleaved rounds."""
    alone, there = f"{MODULE}:measured_alone", "benchmarks.cluster.gathering:there"
    of_tasks = {"run": run, "task_nbytes": task_nbytes}
    variants: dict[str, Callable[[], Row]] = {
        "alone": partial(child, alone, side_by_side=1, **of_tasks),
        "1": partial(child, there, workers=1, settles_heap=True, **of_tasks),
        "side": partial(child, alone, side_by_side=2, **of_tasks),
        "2": partial(child, there, workers=2, settles_heap=True, **of_tasks),
        "scheduler": partial(child, f"{MODULE}:measured_scheduler", run=run),
        "store": partial(child, f"{MODULE}:measured_store", run=run),
    }
    return {name: medians(each) for name, each in interleave(variants, rounds).items()}


def constants_of(rows: dict[str, Row]) -> dict[int, Constants]:
    """Return the constants of one worker alone, and of two side by side."""
    return {
        workers: Constants(
            worker_rate=rows[name]["rate"],
            task_s=rows["scheduler"]["task_s"],
            merge_s=rows[name]["merge_s"],
            store_rate=rows["store"]["store_rate"],
            spread=rows[name]["spread"],
        )
        for workers, name in ((1, "alone"), (2, "side"))
    }


def show_constants(known: dict[int, Constants]) -> None:
    """Print what was measured."""
    table(
        ["measured", "MB/s each", "ms a task", "ms a merge", "store MB/s", "spread %"],
        [
            [
                f"{workers} at once",
                one.worker_rate / 1e6,
                1e3 * one.task_s,
                1e3 * one.merge_s,
                one.store_rate / 1e6,
                100 * one.spread,
            ]
            for workers, one in known.items()
        ],
    )


def show_curves(curves: dict[str, list[dict[str, Any]]]) -> None:
    """Print what is predicted."""
    for name, each in curves.items():
        print(f"\nPredicted for {name} in tasks of 512 MiB, with a store of {STORE_RATE / 1e9:g} GB/s:")
        table(
            ["workers", "hours", "times faster"],
            [[str(one["workers"]), one["hours"], one["speedup"]] for one in each],
        )


def main() -> None:
    parser = options(__doc__, rounds=3, directory=memory_directory())
    parser.add_argument("--mb", type=int, default=1024, help="of raw bfloat16 in the run")
    args = parser.parse_args()
    records = 8 if args.quick else max(16, args.mb * 10**6 // RECORD_NBYTES)
    task_nbytes = min(TASK_NBYTES, records // 4 * RECORD_NBYTES)
    with work_directory(args.directory) as root:
        run = child("benchmarks.cluster.gathering:prepare", root=str(root), records=records)["run"]
        tasks = len(plan_of(run, task_nbytes).tasks)
        rows = measured(run, task_nbytes, args.rounds)
    known = constants_of(rows)
    show_constants(known)
    checks, compared = [], []
    for workers, one in known.items():
        predicted_s = simulated_s(one, workers, tasks, records * RECORD_NBYTES / tasks)
        measured_s = rows[str(workers)]["wall_s"]
        compared.append({"workers": workers, "predicted_s": predicted_s, "measured_s": measured_s})
        what, ratio = f"{workers} workers: predicted over measured", predicted_s / measured_s
        checks += [verdict(what, ratio, 1 - NEAR), verdict(what, ratio, 1 + NEAR, at_most=True)]
    cluster = replace(known[1], store_rate=STORE_RATE)
    curves = {f"{size} TB": curve(cluster, size * 1e12, 512 << 20) for size in (10, 1)}
    show_curves(curves)
    constants = {str(workers): asdict(one) for workers, one in known.items()}
    found = {
        "rounds": args.rounds,
        "constants": constants,
        "compared": compared,
        "curves": curves,
        "checks": checks,
    }
    report(found, args.json)


if __name__ == "__main__":
    main()
