"""The table of a launch: what stands in it, and when it may be overwritten."""

from __future__ import annotations

import pytest
import torch

from capd_client.devstats import segments
from capd_client.devstats.segments import TASKS, SegmentTable, Task, batches, task_of
from capd_client.protocol.statistics_row import ROW_VALUES
from capd_client.rowkernel.artifacts import BLOCK, SEGMENTS, TABLE_FIELDS

HERE = torch.device("cpu")


def task(n: int) -> Task:
    return task_of(torch.empty(1).expand(n), torch.empty(ROW_VALUES, dtype=torch.float64))


@pytest.mark.parametrize("n", [1, BLOCK, 8 * BLOCK, 8 * BLOCK + 1, 1 << 25, (1 << 33) + 1])
def test_the_tasks_of_a_segment_cover_it_in_whole_blocks(n: int) -> None:
    _, length, _, share, count = task(n)

    assert length == n
    assert share % BLOCK == 0
    assert share * (count - 1) < n <= share * count
    assert count <= 512
    assert share < 1 << 30  # counters of a task are 32 bits wide, and a word may hold two values


def test_a_launch_has_so_many_segments_and_tasks() -> None:
    small, large = task(5), task(1 << 25)

    made = list(batches([*[small] * (SEGMENTS + 1), *[large] * 3, small]))

    assert [(len(batch), count) for batch, count in made] == [
        (SEGMENTS, SEGMENTS), (2, 513), (2, 1024), (1, 1)
    ]  # fmt: skip
    assert all(count <= TASKS for _, count in made)
    assert list(batches([])) == []


def test_the_table_names_addresses_and_first_tasks() -> None:
    tensors = [torch.zeros(n) for n in (3, 70_000, 8)]
    rows = [torch.zeros(ROW_VALUES, dtype=torch.float64) for _ in tensors]
    table = SegmentTable(HERE)

    table.send([task_of(*segment) for segment in zip(tensors, rows, strict=True)])

    found = table.on_device[: 3 * TABLE_FIELDS].view(TABLE_FIELDS, 3).tolist()
    assert found[0] == [tensor.data_ptr() for tensor in tensors]
    assert found[1] == [3, 70_000, 8]
    assert found[2] == [row.data_ptr() for row in rows]
    assert found[3] == [0, 1, 4]
    assert found[4] == [8 * BLOCK] * 3


class Event:
    """torch.cuda.Event: happens when it is told to."""

    def __init__(self) -> None:
        self.recorded = 0
        self.happened = False

    def record(self) -> None:
        self.recorded += 1
        self.happened = False

    def query(self) -> bool:
        return self.happened


def test_a_table_is_overwritten_only_when_its_copy_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[tuple[torch.Tensor, Event]] = []

    def new_host(on_gpu: bool) -> segments._HostTable:
        hosts.append((torch.zeros(TABLE_FIELDS * SEGMENTS, dtype=torch.int64), Event()))
        return segments._HostTable(*hosts[-1])

    monkeypatch.setattr(segments, "_new_host", new_host)
    table = SegmentTable(HERE)
    for n in (1, 2, 3):
        table.send([task(n)])
    assert [memory[1].item() for memory, _ in hosts] == [1, 2, 3]  # none was done: each had its own

    hosts[0][1].happened = hosts[1][1].happened = True
    for n in (4, 5, 6):
        table.send([task(n)])
    assert [memory[1].item() for memory, _ in hosts] == [4, 5, 3, 6]
    assert [event.recorded for _, event in hosts] == [2, 2, 1, 1]


def test_a_table_made_in_inference_mode_is_written_outside_of_it() -> None:
    with torch.inference_mode():
        table = SegmentTable(HERE)
        table.send([task(1)])
    table.send([task(2)])
    assert table.on_device[1] == 2
