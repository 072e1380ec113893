"""Two ranks whose capd.toml has several rules: the store has exactly what follows from the rules, and nothing else."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import capd as capd_package
from tests.integration.rules.rules_job import HEADS, LAYERS, MICRO_BATCHES, STEPS, TOKENS, WIDTH
from tests.kit import forking
from tests.kit.processes import Daemon

JOB = Path(__file__).with_name("rules_job.py")
RULES = r"""
quant_type = "mine"

[when]
steps = "0-2"

[[rule]]
name = "attention, forward only"
components = "FA"
operations = "forward"
slices = { query = "tokens:1-2" }
steps = "1,3-:2"

[[rule]]
name = "one layer's first product"
include = 'mlp\.up$'
layers = 0
tensors = ["input", "weight", "grad_weight"]

[[rule]]
name = "statistics"
include = ["mlp", "qkv"]
exclude = 'layers\.0\.mlp'
tensors = ["output", "grad_output"]
store = "stats"
micro_batches = 1

[[rule]]
name = "whole outputs now and then, on one rank"
include = 'layers\.1\.mlp\.down'
tensors = "output"
store = "both"
steps = "0-:2"
ranks = 1

[[rule]]
name = "head"
include = "^head$"
slices = "first:1"
ranks = "0-"
"""
OPERATION = {"grad_output": "backward", "grad_weight": "backward"}


class At(NamedTuple):
    """A record: where, what and when."""

    rank: int
    module: str
    tensor: str
    iteration: int
    micro_batch: int


def expected() -> dict[At, tuple[str, tuple[int, ...]]]:
    """What is kept, and the tensor's shape, of every record that the rules above mean; written out rule by rule."""
    found: dict[At, tuple[str, tuple[int, ...]]] = {}
    heads = (2, HEADS, TOKENS, WIDTH // HEADS)

    for rank, layer, step, mb in itertools.product((0, 1), range(LAYERS), (1, 3), range(MICRO_BATCHES)):
        for tensor in ("query", "key", "value", "output"):
            shape = (2, HEADS, 2, WIDTH // HEADS) if tensor == "query" else heads
            found[At(rank, f"layers.{layer}.attn", tensor, step, mb)] = ("tensor", shape)

    for rank, step in itertools.product((0, 1), (0, 1, 2)):
        up = "layers.0.mlp.up"
        found[At(rank, up, "weight", step, 0)] = ("tensor", (2 * WIDTH, WIDTH))
        for mb in range(MICRO_BATCHES):
            found[At(rank, up, "input", step, mb)] = ("tensor", (2, TOKENS, WIDTH))
            found[At(rank, up, "grad_weight", step, mb)] = ("tensor", (2 * WIDTH, WIDTH))

        widths = {f"layers.{layer}.qkv": 3 * WIDTH for layer in range(LAYERS)}
        widths |= {f"layers.{layer}.mlp.up": 2 * WIDTH for layer in range(1, LAYERS)}
        widths |= {f"layers.{layer}.mlp.down": WIDTH for layer in range(1, LAYERS)}
        for (module, width), tensor in itertools.product(widths.items(), ("output", "grad_output")):
            found[At(rank, module, tensor, step, 1)] = ("statistics", (2, TOKENS, width))

        found[At(rank, "head", "weight", step, 0)] = ("tensor", (5, WIDTH))
        for mb, (tensor, width) in itertools.product(
            range(MICRO_BATCHES), {"input": WIDTH, "output": 5, "grad_output": 5}.items()
        ):
            found[At(rank, "head", tensor, step, mb)] = ("tensor", (1, TOKENS, width))

    for step, mb in itertools.product((0, 2, 4), range(MICRO_BATCHES)):
        found[At(1, "layers.1.mlp.down", "output", step, mb)] = ("tensor", (2, TOKENS, WIDTH))
    return found


class Ended(NamedTuple):
    plain: list[str]
    losses: list[str]
    counters: dict[str, Any]
    log: str


def ranks(way: str, folder: Path, *, world: int = 2, **environment: str) -> list[Ended]:
    """Run the job's ranks side by side in `folder`."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CAPD_")}
    settings = {"PYTHONPATH": str(JOB.parents[3]), "WORLD_SIZE": str(world), "CAPD_LOG": "INFO"}

    def run(rank: int) -> Ended:
        done = forking.run(
            [sys.executable, str(JOB), way],
            env={**inherited, **settings, **environment, "RANK": str(rank)},
            cwd=folder,
            imports=forking.TRAINING,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return Ended(**json.loads(done.stdout.splitlines()[-1]), log=done.stderr)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


@pytest.mark.parametrize("way", ["eager", pytest.param("compiled", marks=pytest.mark.fault)])
def test_the_store_has_exactly_what_the_rules_mean(daemon: Daemon, tmp_path: Path, way: str) -> None:
    (tmp_path / "capd.toml").write_text(RULES)
    capturing = {
        "CAPD_ENDPOINT": daemon.endpoint,
        "CAPD_RUN_ID": "run",
        "CAPD_POLICY": "block",
        "CAPD_STRICT": "1",
    }

    ended = ranks(way, tmp_path, **capturing, CAPD_ARENA_BYTES="8MiB")

    found: dict[At, tuple[str, tuple[int, ...]]] = {}
    values: dict[At, torch.Tensor] = {}
    for series in capd_package.open(daemon.store / "run.zarr").series:
        assert series.key.quant_type == "mine"
        assert series.key.operation == OPERATION.get(series.key.tensor_name, "forward")
        for index, record in enumerate(series.records):
            key = series.key
            at = At(key.rank or 0, key.module, key.tensor_name, record.iteration, record.micro_batch)
            assert at not in found, "kept twice"
            found[at] = (series.kept, tuple(record.shape))
            assert record.stats.count == torch.Size(record.shape).numel()
            if series.kept == "tensor":
                values[at] = series.torch(index)
    assert found == expected()
    for rank, end in enumerate(ended):
        mine = sum(at.rank == rank for at in found)
        assert end.counters == {"offered": mine, "committed": mine, "in_flight": 0, "dropped": {}}
    assert_products(values)
    assert [end.losses for end in ended] == [end.plain for end in ended]
    assert plan_of(ended[0].log) == PLAN


def assert_products(values: dict[At, torch.Tensor]) -> None:
    """Y = X Wᵀ of the head's slices, up to its bias: the rows differ by one vector; dW of the step is X's."""
    seen = Counter(at.module for at in values)
    assert seen["head"]
    for at, output in values.items():
        if at.module == "head" and at.tensor == "output":
            x = values[at._replace(tensor="input")]
            weight = values[at._replace(tensor="weight", micro_batch=0)]
            bias = output - x @ weight.T
            torch.testing.assert_close(bias, bias[:1, :1].expand_as(bias), rtol=1e-5, atol=1e-6)


PLAN = [
    ["rule", "modules", "tensors", "steps", "keeps"],
    ["attention, forward only", "3 FA in layers 0-2", "query (tokens:1-2), key, value, output", "1,3-:2", "full"],
    ["one layer's first product", "1 linear in layer 0", "input, weight, grad_weight", "0-2", "full"],
    ["statistics", "7 linear in layers 0-2", "output, grad_output", "0-2, micro-batches 1", "stats"],
    ["whole outputs now and then, on one rank", "1 linear in layer 1", "output", "0-:2, ranks 1", "both"],
    ["head", "1 linear", "input (first:1), weight, output (first:1), grad_output (first:1)", "0-2, ranks 0-", "full"],
]  # fmt: skip


def plan_of(log: str) -> list[list[str]]:
    """The cells of the table behind the line that says what is watched."""
    lines = log.splitlines()
    at = next(n for n, line in enumerate(lines) if "watching 12 of 13 products of Model" in line)
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[at + 1 : at + 7]]


@pytest.mark.slow
def test_rules_that_cannot_be_meant_are_said_once_each_and_the_job_goes_on(
    daemon: Daemon, tmp_path: Path
) -> None:
    (tmp_path / "capd.toml").write_text(
        '[[rule]]\nname = "none"\ninclude = "mpl"\n'
        '[[rule]]\nname = "query"\ncomponents = "linear"\ntensors = ["query", "input"]\n'
        '[[rule]]\nname = "ranks"\ninclude = "head"\nranks = "0-7"\nslices = "first:1"\n'
        '[[rule]]\nname = "layers"\nlayers = "2-3"\ntensors = "output"\n'
    )

    (ended,) = ranks(
        "eager",
        tmp_path,
        world=1,
        CAPD_ENDPOINT=daemon.endpoint,
        CAPD_POLICY="block",
        CAPD_ARENA_BYTES="8MiB",
    )

    said = [line.removeprefix("capd: ") for line in ended.log.splitlines() if "rule" in line and "'" in line]
    assert said == [
        "rule 'ranks': ranks \"0-7\" name rank 7; this job has rank 0 alone",
        "Model: rules 'query' and 'ranks' contradict each other: both capture input of head in the same steps, as "
        "whole and as first:1; 'query' wins",
        "Model: rule 'none' matches nothing: no module's name fits (layers.0.qkv, layers.0.attn, layers.0.mlp.up, ...)",
        "Model: rule 'query': none of its 10 modules has query; they have input, weight, output, grad_output, "
        "grad_input, grad_weight",
        "Model: rule 'layers': layers \"2-3\" name layer 3; its modules are in layers 0-2",
    ]
    inputs, outputs = 10 * MICRO_BATCHES, 4 * MICRO_BATCHES
    head = 1 + 2 * MICRO_BATCHES  # weight, output and grad_output; its input is captured already
    assert STEPS > 1
    assert ended.counters["committed"] == inputs + outputs + head
    assert ended.counters["dropped"] == {}
