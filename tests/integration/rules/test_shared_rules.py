"""One file of rules for a job that trains several models, found by `capd run` at different times."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.kit import forking

JOB = """
import torch
from torch import nn

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.judge = nn.Linear(4, 4)

    def forward(self, x):
        return self.judge(x)

class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.Linear(4, 4)

    def forward(self, x):
        return self.act(x)

models = [Critic(), Actor()]
optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
for _ in range(3):
    for model, optimizer in zip(models, optimizers):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
RULES = "\n".join(f'[[rule]]\ninclude = "{name}"' for name in ("judge", "act", "nowhere"))


def test_only_what_no_model_of_the_job_has_is_said_and_once(tmp_path: Path) -> None:
    (tmp_path / "capd.toml").write_text(RULES)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CAPD_")}

    done = forking.run(
        [sys.executable, "-m", "capd", "run", "--store", str(tmp_path / "store"), "--", sys.executable, "-c", JOB],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, inner=forking.TORCH,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "watching 1 of 1 products of Critic" in done.stderr
    assert "watching 1 of 1 products of Actor" in done.stderr
    assert [line for line in done.stderr.splitlines() if "matches nothing" in line] == [
        "capd: Critic: rule '3' matches nothing: no module's name fits (model.judge) (nor is there in Actor)"
    ]
