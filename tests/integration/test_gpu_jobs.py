"""The jobs of the GPU tests run from end to end, here with a stand-in for the device: where there is one they must."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import test_cuda_capture as capture
from tests.gpu import test_cuda_hazards as hazards
from tests.gpu import test_cuda_statistics as statistics
from tests.gpu.conftest import PREAMBLE, Job, python_path
from tests.integration.processes import Daemon

STAND_IN = "import tests.gpu.stand_in\n"


@pytest.fixture
def job(tmp_path: Path, runtime_dir: Path) -> Iterator[Job]:
    daemon = Daemon(tmp_path / "store", runtime_dir).start()
    yield Job(daemon, tmp_path, STAND_IN + PREAMBLE)
    daemon.discard()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)


@pytest.mark.parametrize(
    ("test", "more"),
    [
        (
            capture.test_tensors_arrive_as_they_were_whatever_happens_to_them_and_no_call_waits,
            (same, "ready"),
        ),
        pytest.param(
            capture.test_a_watched_layer_in_training_forward_and_backward, (same,), marks=pytest.mark.fault
        ),
        pytest.param(capture.test_the_ring_is_allocated_at_watch, (), marks=pytest.mark.fault),
        (capture.test_small_captures_share_copies, (same,)),
        pytest.param(
            hazards.test_graph_captures_of_other_threads_survive_pending_captures,
            (same,),
            marks=pytest.mark.fault,
        ),
        pytest.param(
            hazards.test_a_static_tap_gives_what_each_replay_computed, (same,), marks=pytest.mark.fault
        ),
        (hazards.test_a_failed_page_lock_costs_speed_and_nothing_else, (same,)),
        (statistics.test_device_and_daemon_agree, ("stats",)),
        (statistics.test_many_rows_at_once_are_those_of_torchs_operations_and_nothing_waits, (0,)),
    ],
)
def test_it_runs(job: Job, test: Callable[..., None], more: tuple[Any, ...]) -> None:
    test(job, *more)


def test_what_the_sanitizer_looks_at_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STAND_IN + hazards.SANITIZED, "as it is"],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("clean\n", 0), done.stderr
