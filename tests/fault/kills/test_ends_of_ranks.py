"""Two hundred ends of a rank, in every way that a process ends: nothing that it had captured is lost with it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.kit import figures
from tests.fault.kit.ends import end_ranks
from tests.integration.daemon.test_limits import MIB, MemoryGroup
from tests.kit.processes import Daemon

pytestmark = [pytest.mark.fault, pytest.mark.timeout(900)]

ENDS, OUT_OF_MEMORY_ENDS = 170, 30


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        made = MemoryGroup(96 * MIB)  # on top of what a rank shares with the process that it was forked from
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield made
    made.path.rmdir()


def test_no_end_of_a_rank_loses_what_it_had_captured(daemon: Daemon, tmp_path: Path) -> None:
    figures.note("ends of ranks", **end_ranks(daemon, tmp_path, random.Random(11), ENDS))


def test_nor_does_one_that_runs_out_of_memory(daemon: Daemon, tmp_path: Path, group: MemoryGroup) -> None:
    seen = end_ranks(daemon, tmp_path, random.Random(12), OUT_OF_MEMORY_ENDS, group.path)
    assert group.killed() >= seen["memory"]
    figures.note("ends of ranks, some out of memory", **seen)
