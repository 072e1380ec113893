"""Real clients: which iteration and micro-batch a record carries, against what the training loop itself knows.

The frameworks of `counting_job.py`, each in one process, and Lightning's DDP on two ranks. `own_step` is watched before
transformers is imported. Nobody tells capd where the
jobs are. Each record is compared with what the job noted beside it: its moment and, bit for bit, the tensor.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import capd as capd_package
from tests.kit import forking
from tests.kit.processes import Daemon
from tests.kit.tiers import rows, rows_wanted

pytestmark = pytest.mark.timeout(300)  # the first test waits for all jobs
JOB = Path(__file__).with_name("counting_job.py")
RANKS = {"transformers": 1, "lightning": 1, "ddp": 2}  # of each run
MODULES = {  # of the reference: run, scenario, module, and the iterations that the framework must have reached
    "own_step": ("transformers", "own_step", "own_step.fc", range(6)),
    "trainer": ("transformers", "trainer", "trainer.fc", range(6)),
    "resumed": ("transformers", "trainer", "resumed.fc", range(3, 5)),
    "after": ("transformers", "trainer", "after.fc", range(6, 8)),
    "accelerate": ("transformers", "accelerate", "accelerate.fc", range(6)),
    "lightning": ("lightning", "lightning", "lightning.net.fc", range(6)),
    "lightning_resumed": ("lightning", "lightning", "lightning_resumed.net.fc", range(6, 8)),
    "lightning_manual.net": ("lightning", "lightning_manual", "lightning_manual.net.fc", range(0, 10, 2)),
    "lightning_manual.other": ("lightning", "lightning_manual", "lightning_manual.other.fc", range(1, 10, 2)),
    "fabric": ("lightning", "fabric", "fabric.fc", range(20, 23)),
    "lightning_ddp": ("ddp", "lightning_ddp", "lightning_ddp.net.fc", range(6)),
}
QUICK = ("own_step", "trainer", "resumed", "after", "accelerate", "lightning", "lightning_resumed")
EVALUATION = "capd: forwards without gradients are taken for evaluation"
Call = tuple[int, int, int]


@dataclass
class Result:
    """What the ranks of a run noted, and what the store has of the run."""

    scenarios: list[str]
    held: list[dict[str, Any]]
    store: Any

    def records(self, rank: int, module: str, tensor_name: str) -> list[tuple[Call, torch.Tensor]]:
        """The records of one tensor, in the order of their moments."""
        found = [
            ((r.iteration, r.micro_batch, r.call), series.torch(i))
            for series in self.store.find(rank=rank, module=module, tensor_name=tensor_name)
            for i, r in enumerate(series.records)
        ]
        return sorted(found, key=lambda record: record[0])


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[dict[str, Result]]:
    """All jobs that are wanted, side by side: most of their time is imports."""
    scenarios: dict[str, dict[str, None]] = {}  # run → its scenarios, in the order of the table
    wanted = rows_wanted(request, "name", ["trainer", "lightning"])
    for name, (run, scenario, *_) in MODULES.items():
        if name in wanted:
            scenarios.setdefault(run, {})[scenario] = None
    with tempfile.TemporaryDirectory(prefix="capd-c-", dir="/tmp") as name, ExitStack() as stack:
        directory = Path(name)
        daemon = Daemon(directory / "store", directory).start()
        stack.callback(daemon.discard)
        started = [
            _start(stack, directory, daemon.endpoint, run, rank, [*of_run])
            for run, of_run in scenarios.items()
            for rank in range(RANKS[run])
        ]
        for log, process in started:
            ended = process.wait(280)
            output = log.read_text()
            assert ended == 0, output[-5000:]
            assert "capd: " not in output.replace(EVALUATION, ""), output
        daemon.stop()
        yield {
            run: Result(
                [*of_run],
                [torch.load(directory / f"{run}.{rank}.pt", weights_only=True) for rank in range(RANKS[run])],
                capd_package.open(directory / "store" / f"{run}.zarr"),
            )
            for run, of_run in scenarios.items()
        }


def _start(
    stack: ExitStack, directory: Path, endpoint: str, run: str, rank: int, scenarios: list[str]
) -> tuple[Path, subprocess.Popen[bytes]]:
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("CAPD_")},
        "CAPD_ENDPOINT": endpoint,
        "CAPD_RUN_ID": run,
        "CAPD_POLICY": "block",
        "CAPD_ARENA_BYTES": str(8 << 20),
        "PYTHONPATH": os.pathsep.join([str(JOB.parents[3]), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
    }
    if RANKS[run] > 1:  # what torchrun would set
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS[run]),
            **_rendezvous(),
        }
    path = directory / f"{run}.{rank}.log"
    with path.open("wb") as log:
        process = forking.popen(
            [sys.executable, str(JOB), str(directory / run), *scenarios],
            env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(process.kill)
    return path, process


_port: list[str] = []


def _rendezvous() -> dict[str, str]:
    if not _port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            _port.append(str(free.getsockname()[1]))
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _port[0],
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "x",
    }


@pytest.mark.parametrize("name", rows(MODULES, QUICK))
def test_every_record_has_the_moment_that_its_loop_knows(results: dict[str, Result], name: str) -> None:
    run, _, module, iterations = MODULES[name]
    result = results[run]
    for rank, held in enumerate(result.held):
        noted = [(tuple(at), x) for at, x in held["calls"][name]]
        inputs = result.records(rank, module, "input")

        assert {at[0] for at, _ in noted} == set(iterations)
        assert [at for at, _ in inputs] == [at for at, _ in noted]
        assert all(torch.equal(x, held_x) for (_, x), (_, held_x) in zip(inputs, noted, strict=True))
        for tensor_name in ("output", "grad_output"):
            assert [at for at, _ in result.records(rank, module, tensor_name)] == [at for at, _ in noted]
        weights = result.records(rank, module, "weight")
        assert [at for at, _ in weights] == [(i, 0, 0) for i in iterations]


def test_the_losses_of_training_steps_in_lightning_come_by_themselves(results: dict[str, Result]) -> None:
    result = results["lightning"]
    watched, _ = result.held[0]["losses"]["lightning"]

    loss = result.store.scalar("loss")
    assert loss.values.tolist() == watched
    assert sorted(set(loss.iterations.tolist())) == [*range(9)]


def test_losses_are_the_same_with_capture_on_and_off(results: dict[str, Result]) -> None:
    for result in results.values():
        for held in result.held:
            assert list(held["losses"]) == result.scenarios
            for watched, plain in held["losses"].values():
                assert watched
                assert watched == plain


def test_nothing_is_lost(results: dict[str, Result]) -> None:
    for result in results.values():
        for held in result.held:
            counters = held["counters"]
            assert (counters["dropped"], counters["in_flight"]) == ({}, 0)
            assert counters["offered"] == counters["committed"] > 0
