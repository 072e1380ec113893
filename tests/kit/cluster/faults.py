"""Faults of tasks, which workers load before they run any."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["failing_task"]

_FAILING = """
from capd.distributed.tasks import running

def deep():
    return deep()

def failing(task, run_task=running.run_task):
    if running.task_of(task).task == {number}:
        {fault}
    return run_task(task)

# Dask may load this twice.
if running.run_task.__name__ == "run_task":
    running.run_task = failing
"""


def failing_task(directory: Path, fault: str, number: int = 3) -> dict[str, str]:
    """Return the environment in which the workers of a command meet a fault, a line of Python, in one task."""
    preload = directory / "failing.py"
    preload.write_text(_FAILING.format(fault=fault, number=number))
    return {"DASK_DISTRIBUTED__WORKER__PRELOAD": json.dumps([str(preload)])}
