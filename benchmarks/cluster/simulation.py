"""A list-scheduling simulation of tasks on workers, with a serial scheduler, a store of limited speed, and merges."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from capd.distributed.cluster.tree import FAN_IN

__all__ = ["Constants", "simulated_s"]


@dataclass(frozen=True)
class Constants:
    """What is measured.

    Attributes:
        worker_rate: The bytes of records that a worker measures in a second.
        task_s: The seconds that the scheduler and the client take for each task, one task after another.
        merge_s: The seconds that a worker takes to merge FAN_IN results.
        store_rate: The bytes that the store delivers in a second to all workers together.
        spread: The standard deviation of the time of equal tasks, as a share of it.
    """

    worker_rate: float
    task_s: float
    merge_s: float
    store_rate: float
    spread: float


def simulated_s(known: Constants, workers: int, tasks: int, task_nbytes: float, *, seed: int = 0) -> float:
    """Return the predicted seconds. Tasks begin in order, each on the worker that is free first."""
    rng = random.Random(seed)
    free = [0.0] * workers
    heapq.heapify(free)
    scheduler = store = end = 0.0
    for number in range(tasks):
        scheduler += known.task_s
        begin = max(scheduler, heapq.heappop(free))
        merges = known.merge_s if number % FAN_IN == FAN_IN - 1 else 0.0
        spent = task_nbytes / known.worker_rate * max(0.1, rng.gauss(1.0, known.spread))
        # All workers share the store, which delivers one task after another. Reading goes on beside the work.
        store = max(store, begin) + task_nbytes / known.store_rate
        done = max(begin + spent, store) + merges
        heapq.heappush(free, done)
        end = max(end, done)
    # The levels above the first wait for each other.
    levels, left = 0, -(-tasks // FAN_IN)
    while left > 1:
        levels, left = levels + 1, -(-left // FAN_IN)
    return end + levels * (known.merge_s + known.task_s)
