"""The segments of a launch: their tasks, and the table of them that the kernels read.

The table goes to the device by one asynchronous copy out of page-locked memory. A table is overwritten only once the
event behind its copy has happened; where none is free, one more is made. So the host never waits, and there are as
many tables as the caller has launches under way.
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
"""Tasks of one launch at most: 2.2 MB of partial rows."""

_NUMBERS = TABLE_FIELDS * SEGMENTS
_SHARE = 8 * BLOCK  # elements of a task at least: what a partial row costs is little beside so many
_SHARES = 512  # tasks of one segment at most

Task = tuple[int, int, int, int, int]
"""What is asked for of one segment: its address, its elements, the address of its row, elements of a task, tasks."""


def task_of(flat: torch.Tensor, row: torch.Tensor) -> Task:
    """Shares depend on the length alone: whatever else is in the launch, the same tensor has the same row."""
    n = flat.numel()
    share = max(_SHARE, -(-n // (_SHARES * BLOCK)) * BLOCK)
    return flat.data_ptr(), n, row.data_ptr(), share, -(-n // share)


def batches(tasks: Iterable[Task]) -> Iterator[tuple[list[Task], int]]:
    """What goes into one launch, and its number of tasks."""
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
    """The table of one launch at a time, on the device. All launches that read it are issued to one stream.

    Its events come in that stream's order: where the oldest copy is not done, none is.
    """

    def __init__(self, device: torch.device) -> None:
        self._hosts: deque[_HostTable] = deque()  # oldest first
        with torch.inference_mode(False):  # an inference tensor could not be written outside of that mode
            self.on_device = torch.empty(_NUMBERS, dtype=torch.int64, device=device)

    def send(self, batch: list[Task]) -> None:
        """Copy the tasks of a launch to the device, by the current stream."""
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
    """A page-locked table. copied: the event behind the copy out of it, None on the CPU."""

    memory: torch.Tensor
    copied: Optional[Any]


def _new_host(on_gpu: bool) -> _HostTable:
    with torch.inference_mode(False):
        memory = torch.empty(_NUMBERS, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
    return _HostTable(memory, torch.cuda.Event() if on_gpu else None)  # type: ignore[no-untyped-call]  # torch's own lack
