"""Scalars of real jobs: what a loop recorded is read bit for bit, also after a kill of the rank or of the daemon."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import capd
from tests.kit import forking
from tests.kit.paths import REPOSITORY
from tests.kit.processes import Daemon, until
from tests.kit.store.cli import run_capd

JOB = Path(__file__).with_name("scalars_job.py")
RANKS = 2


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="capd-s-", dir="/tmp") as directory:
        started = Daemon(Path(directory) / "store", Path(directory)).start()
        try:
            yield started
        finally:
            started.discard()


def start(daemon: Daemon, what: str, rank: int = 0, size: int = 1, **more: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CAPD_")} | {
        "CAPD_ENDPOINT": daemon.endpoint, "CAPD_RUN_ID": "run", "PYTHONPATH": str(REPOSITORY), "RANK": str(rank),
        "WORLD_SIZE": str(size), **more,
    }  # fmt: skip
    return forking.popen(
        [sys.executable, str(JOB), what], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        imports=forking.TRAINING if what == "train" else forking.TORCH,
    )  # fmt: skip


def held(run: Path) -> int:
    """The numbers that the run has by now."""
    store = capd.open(run)
    return len(store.scalar("number")) if "number" in store.scalars() else 0


def test_two_ranks_keep_their_losses_norms_and_rates_in_every_step(daemon: Daemon) -> None:
    jobs = [start(daemon, "train", rank, RANKS, CAPD_MODE="sample:1/100") for rank in range(RANKS)]
    said: dict[tuple[str, int], list[tuple[int, int, float]]] = defaultdict(list)
    for rank, job in enumerate(jobs):
        out, _ = job.communicate(timeout=120)
        assert job.returncode == 0
        for line in out.splitlines():
            name, step, micro_batch, number = line.split()
            said[name, rank].append((int(step), int(micro_batch), float.fromhex(number)))
    daemon.stop()

    store = capd.open(daemon.store / "run.zarr")
    assert store.scalars() == {"grad_norm": [0, 1], "micro": [0, 1], "rate": [0]}
    for (name, rank), expected in said.items():
        found = store.scalar(name, rank=rank)
        columns = (found.iterations.tolist(), found.micro_batches.tolist(), found.values.tolist())
        assert list(zip(*columns, strict=True)) == expected
    totals = store.totals()
    assert (totals.scalar_records, set(totals.dropped)) == (sum(map(len, said.values())), {"sampled"})
    assert {series.key.tensor_name for series in store.series} <= {"input", "weight", "output", "grad_output"}


def test_a_killed_rank_loses_no_scalar_that_its_call_returned_for(daemon: Daemon) -> None:
    job = start(daemon, "count")
    assert job.stdout is not None
    recorded = [int(job.stdout.readline()) for _ in range(400)]
    job.kill()
    recorded += [int(line) for line in job.stdout.read().splitlines()]
    job.communicate()
    daemon.stop()

    found = capd.open(daemon.store / "run.zarr").scalar("number")
    assert found.values.tolist()[: len(recorded)] == [number / 3 for number in recorded]
    # The kill may have come between a call and its line.
    assert found.iterations.tolist() == [*range(len(found))]
    assert len(recorded) <= len(found) <= len(recorded) + 1


@pytest.mark.slow
def test_a_killed_daemon_keeps_every_scalar_that_it_acknowledged(daemon: Daemon) -> None:
    job = start(daemon, "keep")
    assert job.stdout is not None
    assert job.stdout.readline() == "flushed\n"
    daemon.kill()
    job.kill()
    job.communicate()

    before = capd.open(daemon.store / "run.zarr").scalar("number").values.tolist()
    daemon.start().stop()
    after = capd.open(daemon.store / "run.zarr").scalar("number").values.tolist()
    assert before == after == [number / 3 for number in range(100)]
    assert run_capd("verify", daemon.store).code == 0


@pytest.mark.slow
def test_a_rank_goes_on_while_its_daemon_is_away(daemon: Daemon) -> None:
    job = start(daemon, "count")
    assert job.stdout is not None
    lines = job.stdout
    for _ in range(50):
        lines.readline()
    daemon.kill()
    seen = [int(lines.readline()) for _ in range(300)]
    daemon.start()
    run = daemon.store / "run.zarr"
    until(lambda: held(run) > seen[-1])
    job.kill()
    job.communicate()
    daemon.stop()

    found = capd.open(run).scalar("number")
    assert found.iterations.tolist() == [*range(len(found))]
    assert found.values.tolist() == [number / 3 for number in range(len(found))]


FOUND = """
import sys

import lightning.pytorch as pl
import torch

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        loss = self.net(batch).square().mean()
        print("loss", loss.item().hex(), flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

pl.Trainer(
    max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
    enable_model_summary=False, gradient_clip_val=1.0,
).fit(Module(), torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=2))
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_script_that_knows_nothing_of_capd_has_its_losses_from_the_first_step_on(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    (tmp_path / "script.py").write_text(FOUND)

    done = forking.run(
        [sys.executable, "-m", "capd", "run", "--store", str(tmp_path), "--run-id", "job", "--",
         sys.executable, "script.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=180, inner=forking.TRAINING,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    said = [float.fromhex(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss ")]
    store = capd.open(tmp_path / "job.zarr")
    assert store.scalar("loss").values.tolist() == said
    assert (
        store.scalar("loss").iterations.tolist() == store.scalar("grad_norm").iterations.tolist() == [0, 1, 2]
    )
