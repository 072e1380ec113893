"""Pipelines whose script knows nothing of capd: the stages that `capd run` finds, from their first micro-batch on.

A stage learns shapes from a forward and a backward on uninitialised memory, before its first micro-batch. What the
first stage gets is known bit for bit; what the others get is what the stage before them computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.integration.counters.found_pipeline_job import CHUNKS, ROWS, STEPS, WIDTH, batch
from tests.kit.algebra import Captures, Mismatch, check_linear, controls
from tests.kit.expected import Expected
from tests.kit.launching import run_ranks
from tests.kit.tiers import rows

RANKS, LAYERS = 2, 2
JOB = Path(__file__).with_name("found_pipeline_job.py")
TENSORS = ("input", "weight", "output", "grad_output", "grad_weight")
SCHEDULES = {"ScheduleGPipe": 1, "ScheduleInterleavedZeroBubble": 2}
"""Schedule → stages of each rank."""
every_schedule = pytest.mark.parametrize("name", rows(SCHEDULES, ["ScheduleInterleavedZeroBubble"]))

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Captures]:
    """What is captured of a schedule, trained once."""
    done: dict[str, Captures] = {}

    def run(name: str) -> Captures:
        if name not in done:
            directory = tmp_path_factory.mktemp(name)
            done[name] = Captures.of_store(trained(name, directory))
        return done[name]

    return run


def trained(name: str, directory: Path) -> Path:
    rules = directory / "rules.toml"
    rules.write_text(f"[[rule]]\ntensors = {list(TENSORS)}\n")
    settings = {"CAPD_STEPS": "all", "CAPD_SELECT": str(rules)}
    return run_ranks(JOB, RANKS, directory, name, str(SCHEDULES[name]), **settings)


@every_schedule
def test_stages_are_named_by_their_number_and_captured_from_their_first_micro_batch(
    run: Callable[[str], Captures], name: str
) -> None:
    found = Expected(steps=range(STEPS), micro_batches=CHUNKS)
    for stage, layer in itertools.product(range(SCHEDULES[name] * RANKS), range(LAYERS)):
        where, ranks = f"stage{stage}", [stage % RANKS]
        module = f"{where}.layers.{layer}"
        found.linear(module, (ROWS,), WIDTH, WIDTH, tensors=TENSORS, at=(layer, where), ranks=ranks)
    found.check(run(name))


@every_schedule
def test_each_micro_batch_has_its_own_values_from_the_first_step_on(
    run: Callable[[str], Captures], name: str
) -> None:
    captures = run(name)
    for step, micro_batch in itertools.product(range(STEPS), range(CHUNKS)):
        handed_on = batch(step).chunk(CHUNKS)[micro_batch]
        for stage in range(SCHEDULES[name] * RANKS):
            at = (step, micro_batch, 0)
            assert torch.equal(captures.one(f"stage{stage}.layers.0", "input", at), handed_on)
            handed_on = captures.one(f"stage{stage}.layers.1", "output", at).tanh()


@every_schedule
def test_gradients_are_those_of_their_micro_batch_from_the_first_step_on(
    run: Callable[[str], Captures], name: str
) -> None:
    """Also where a zero-bubble schedule computes those of weights later."""
    captures = run(name)
    calls = SCHEDULES[name] * RANKS * LAYERS * STEPS * CHUNKS
    assert check_linear(captures, tolerance=1e-6) == {"Y": calls, "dW": calls}
    for wrong in controls(captures, "grad_weight"):
        with pytest.raises(Mismatch):
            check_linear(wrong, tolerance=1e-6)
