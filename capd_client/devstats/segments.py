"""The segments of a launch: their tasks, and the table of tasks that the kernels read.

One asynchronous copy from page-locked memory brings a table to the device. A table is overwritten only after the event
of its copy. If no table is free, a new one is made. The host therefore never waits, and there are as many tables as
there are launches in progress.
"""

from __future__ import annotations

import array
import ctypes
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Optional

import torch

from capd_client.rowkernel.artifacts import BLOCK, SEGMENTS, TABLE_FIELDS

__all__ = ["TASKS", "SegmentTable", "Task", "batches", "task_of"]

TASKS = 1024
"""The limit of tasks in one launch: 2.2 MB of partial rows."""

_NUMBERS = TABLE_FIELDS * SEGMENTS
# The least elements of a task. The cost of a partial row is small for that many.
_SHARE = 8 * BLOCK
# The most tasks of one segment.
_SHARES = 512

Task = tuple[int, int, int, int, int]
"""The work for one segment: its address, its elements, the address of its row, elements of a task, tasks."""


def task_of(flat: torch.Tensor, row: torch.Tensor) -> Task:
    """Return the work for one segment.

    Shares depend on the length alone, so a tensor has the same row whatever else is in the launch.
    """
    n = flat.numel()
    share = max(_SHARE, -(-n // (_SHARES * BLOCK)) * BLOCK)
    return flat.data_ptr(), n, row.data_ptr(), share, -(-n // share)


def batches(tasks: Iterable[Task]) -> Iterator[tuple[list[Task], int]]:
    """Yield the segments of each launch, and its number of tasks."""
    batch: list[Task] = []
    count = 0
    for task in tasks:
        if len(batch) == SEGMENTS or count + task[4] > TASKS:
            yield batch, count
            batch, count = [], 0
        batch.append(task)
        count += task[4]
    if batch:
        yield batch, count


class SegmentTable:
    """The table of one launch at a time, on the device. All launches that read it go to one stream.

    Events happen in that stream's order: if the oldest copy is not done, no copy is.
    """

    def __init__(self, device: torch.device) -> None:
        # The oldest table is first.
        self._hosts: deque[_HostTable] = deque()
        # Outside inference mode, no one could write to an inference tensor.
        with torch.inference_mode(False):
            self.on_device = torch.empty(_NUMBERS, dtype=torch.int64, device=device)

    def send(self, batch: list[Task]) -> None:
        """Copy the tasks of a launch to the device, on the current stream."""
        addresses, lengths, rows, shares, counts = zip(*batch, strict=True)
        firsts = (0, *accumulate(counts[:-1]))
        values = array.array("q", (*addresses, *lengths, *rows, *firsts, *shares))
        host = self._free_host()
        ctypes.memmove(host.memory.data_ptr(), values.buffer_info()[0], 8 * len(values))
        self.on_device[: len(values)].copy_(host.memory[: len(values)], non_blocking=True)
        if host.copied is not None:
            host.copied.record()
        self._hosts.append(host)

    def _free_host(self) -> _HostTable:
        if self._hosts and (self._hosts[0].copied is None or self._hosts[0].copied.query()):
            return self._hosts.popleft()
        return _new_host(self.on_device.is_cuda)


@dataclass(eq=False)
class _HostTable:
    """A page-locked table. `copied` is the event after the copy from it; None on the CPU."""

    memory: torch.Tensor
    copied: Optional[Any]


def _new_host(on_gpu: bool) -> _HostTable:
    with torch.inference_mode(False):
        memory = torch.empty(_NUMBERS, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
    return _HostTable(memory, torch.cuda.Event() if on_gpu else None)  # type: ignore[no-untyped-call]  # torch's own lack
