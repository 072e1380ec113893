"""What a job of several ranks prints below `capd run`: each thing once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.kit import forking

JOB = """
from capd_client.process import together
# A line of all ranks is written with the last of them, which may be late on a busy machine. The others are at the end.
together.GATHER_S = 120.0
import os, sys, torch, capd_client
from torch import distributed, nn

distributed.init_process_group("gloo")
rank = distributed.get_rank()
alike = nn.Sequential(nn.Linear(4, 4))
distributed.barrier()
capd_client.watch(alike, name="alike")
capd_client.watch(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + rank // 2))), name="stage")
if rank == 3:
    capd_client.watch(alike, name="again", steps="never")
optimizer = torch.optim.SGD(alike.parameters(), 0.1)
for _ in range(2):
    alike(torch.ones(2, 4)).sum().backward()
    optimizer.step()
distributed.barrier()
distributed.destroy_process_group()
"""
FOUND = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""


def run(directory: Path, script: str, ranks: int, **settings: str) -> list[str]:
    """What capd says of a job."""
    (directory / "job.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CAPD_")}
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    )
    done = forking.run(
        [sys.executable, "-m", "capd", "run", "--", sys.executable, *launcher, "job.py"],
        cwd=directory, capture_output=True, text=True, timeout=300, inner=forking.TRAINING,
        env={**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **settings},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("capd: ") for line in done.stderr.splitlines() if line.startswith("capd: ")]


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.fault)])
def test_ranks_that_agree_say_it_once_and_the_others_are_named(ranks: int, tmp_path: Path) -> None:
    said = run(tmp_path, JOB, ranks)

    assert [line.partition(":")[0] for line in said if "captures of run" in line] == [f"ranks 0-{ranks - 1}"]
    assert sorted(line.partition(" products")[0] for line in said if "watching" in line) == sorted(
        [
            *(f"ranks {at}-{at + 1}: watching {2 + at // 2} of {2 + at // 2}" for at in range(0, ranks, 2)),
            f"ranks 0-{ranks - 1}: watching 1 of 1",
        ]
    )
    assert [line.partition(" read")[0] for line in said if "watch(steps" in line] == [
        "rank 3: watch(steps=...): cannot"
    ]


def test_debug_shows_what_each_rank_says(tmp_path: Path) -> None:
    said = run(tmp_path, FOUND, 2, CAPD_LOG="debug")

    assert sorted(line.partition(" products")[0] for line in said if "watching" in line) == [
        f"rank {rank}: watching 1 of 1" for rank in range(2)
    ]


def test_that_there_is_no_daemon_is_said_once(tmp_path: Path) -> None:
    said = run(tmp_path, FOUND, 1, CAPD_ENDPOINT=f"unix:{tmp_path}/nobody.sock")

    assert [line.partition(" (")[0] for line in said] == [
        f"no daemon at {tmp_path}/nobody.sock: No such file or directory; start `capd serve`, or set CAPD_ENDPOINT; "
        "the job runs without capture until a daemon is there",
        "watching 1 of 1 products of Sequential",
        "4 captures were still unacknowledged at exit and are lost",
        "next  capd serve · capd doctor --quick",
    ]
