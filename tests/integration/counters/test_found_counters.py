"""Frameworks that count for themselves in a script that knows nothing of capd: stand-ins in the place of the real ones.

They have the methods and attributes of DeepSpeed's engine and of torchtitan's trainer, which the slow tier trains with
itself. The model is found in the middle of their first call.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import capd
from tests.kit import forking
from tests.kit.paths import REPOSITORY

pytestmark = pytest.mark.timeout(120)

DEEPSPEED = """
import torch

class DeepSpeedEngine(torch.nn.Module):
    def __init__(self, model, optimizer, accumulated):
        super().__init__()
        self.module, self.optimizer, self.accumulated = model, optimizer, accumulated
        self.global_steps = self.micro_steps = 0

    def gradient_accumulation_steps(self):
        return self.accumulated

    def forward(self, x):
        return self.module(x)

    def step(self):
        self.micro_steps += 1
        if self.micro_steps % self.accumulated == 0:
            self.optimizer.step()
            self.global_steps += 1
"""
ENGINE = """
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

model = torch.nn.Sequential(torch.nn.Linear(4, 4))
engine = DeepSpeedEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
for number in range(6):
    engine(torch.full((1, 4), float(number))).sum().backward()
    engine.step()
"""
TORCHTITAN = """
from types import SimpleNamespace

import torch

class Trainer:
    def __init__(self, model):
        self.step, self.given, self.model = 0, 0, model
        self.parallel_dims = SimpleNamespace(pp_enabled=False)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward_backward_step(self):
        x = torch.full((1, 4), float(self.given))
        self.given += 1
        self.model(x).sum().backward()

    def train_step(self):
        for _ in range(3):
            self.forward_backward_step()
        self.optimizer.step()

    def train(self):
        for self.step in (1, 2):
            self.train_step()
"""
TRAINER = """
import torch
from torchtitan.trainer import Trainer

trainer = Trainer(torch.nn.Sequential(torch.nn.Linear(4, 4)))
kept = trainer.forward_backward_step
trainer.forward_backward_step = lambda: kept()
trainer.train()
"""


@pytest.mark.parametrize(
    ("module", "framework", "script"),
    [
        pytest.param("deepspeed.runtime.engine", DEEPSPEED, ENGINE, id="deepspeed"),
        pytest.param("torchtitan.trainer", TORCHTITAN, TRAINER, id="torchtitan"),
    ],
)
def test_the_first_step_of_a_found_model_has_the_moments_that_its_framework_counts(
    module: str, framework: str, script: str, tmp_path: Path
) -> None:
    path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True)
    path.write_text(framework)
    (tmp_path / "script.py").write_text(script)

    done = forking.run(
        [sys.executable, "-m", "capd", "run", "--store", str(tmp_path), "--run-id", "job", "--",
         sys.executable, "script.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, inner=forking.TRAINING,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(tmp_path)]), "CAPD_STEPS": "all"},
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    [inputs] = capd.open(tmp_path / "job.zarr").find(tensor_name="input")
    given = [
        (inputs.torch(i)[0, 0].item(), record.iteration, record.micro_batch, record.call)
        for i, record in enumerate(inputs.records)
    ]
    assert sorted(given) == [(3.0 * step + m, step, m, 0) for step in (0, 1) for m in range(3)]
