"""Two ranks with an emulated model compute what one process computes."""

from __future__ import annotations

import os
import sys

import pytest

from tests.kit import forking
from tests.kit.paths import REPOSITORY


@pytest.mark.parametrize(
    ("how", "order"),
    [
        ("ddp", "before"),
        ("fsdp2", "after"),
        pytest.param("fsdp2", "before", marks=pytest.mark.fault),
        ("tp", "after"),
        pytest.param("tp", "before", marks=pytest.mark.fault),
    ],
)
def test_gradients_reach_the_parameters_of_a_distributed_model(how: str, order: str) -> None:
    job = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(REPOSITORY / "tests/kit/emulated/ranks_job.py"), how, order,
    ]  # fmt: skip
    done = forking.run(
        job, capture_output=True, text=True, timeout=100, cwd=REPOSITORY, inner=forking.TRAINING,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-3000:]
