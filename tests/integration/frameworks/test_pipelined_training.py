"""torch.distributed.pipelining: two ranks train a tiny transformer by every sort of schedule, once.

A stage says itself which activation it received and handed on. Under right micro-batches those of neighbouring stages
are the same bits, and what the first one received are the tokens of that micro-batch, as configured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from capd_client.protocol.kinds import ATTENTION, LINEAR
from tests.kit.algebra import Captures, Mismatch, attention, check_attention, check_linear, controls
from tests.kit.expected import Expected
from tests.kit.launching import run_ranks
from tests.kit.models.sharded_models import HEADS, LINEARS, ROWS, STEPS, TOKENS, WIDTH, WORDS, batch
from tests.kit.tiers import rows, rows_wanted

RANKS, CHUNKS = 2, 4
JOB = Path(__file__).with_name("pipeline_job.py")
STAGES = {"gpipe": 1, "one_f_one_b": 1, "interleaved": 2, "zero_bubble": 2, "zero_bubble_v": 2}
"""Schedule → stages of each rank, as in pipeline_job.py, in its order."""
CHECKPOINTED = {
    "gpipe_reentrant": 1,
    "one_f_one_b_non_reentrant": 1,
    "interleaved_reentrant": 2,
    "zero_bubble_non_reentrant": 2,
}
"""The same of those whose blocks compute their activations twice: a job of its own."""
QUICK = ("one_f_one_b", "zero_bubble")
SCHEDULES = rows((*STAGES, *CHECKPOINTED), QUICK)
ROUNDS = {"gpipe": 2}
"""Schedule steps per optimizer step, where they are not 1."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def plain(request: pytest.FixtureRequest) -> Iterator[Captures]:
    yield from trained(STAGES, request)


@pytest.fixture(scope="module")
def checkpointed(request: pytest.FixtureRequest) -> Iterator[Captures]:
    yield from trained(CHECKPOINTED, request)


def trained(all_schedules: Iterable[str], request: pytest.FixtureRequest) -> Iterator[Captures]:
    wanted = rows_wanted(request, "name")
    schedules = [name for name in all_schedules if name in wanted]
    begins.update({name: STEPS * number for number, name in enumerate(schedules)})
    with tempfile.TemporaryDirectory(prefix="capd-pipelines-") as name:
        yield Captures.of_store(run_ranks(JOB, RANKS, Path(name), *schedules))


begins: dict[str, int] = {}
"""Schedule → its first iteration: one process runs those that are wanted one after the other."""


@pytest.fixture
def captures(name: str, request: pytest.FixtureRequest) -> Captures:
    """Everything that the ranks captured that ran this schedule, under all of theirs."""
    found: Captures = request.getfixturevalue("checkpointed" if name in CHECKPOINTED else "plain")
    return found


def stages_of(name: str) -> int:
    return {**STAGES, **CHECKPOINTED}[name] * RANKS


def steps(name: str) -> range:
    return range(begins[name], begins[name] + STEPS)


def micro_batches(name: str) -> int:
    return CHUNKS * ROUNDS.get(name, 1)


def rank_of(name: str, stage: int) -> int:
    if name == "zero_bubble_v":
        return min(stage, stages_of(name) - 1 - stage)
    return stage % RANKS


def tapped(captures: Captures, name: str) -> Captures:
    """What the watches of one schedule's stages captured."""
    return captures.without(lambda r: not r.call.module.startswith(f"{name}.") or not r.call.layer_type)


def expected(name: str) -> Expected:
    """Every product of every stage, once in each micro-batch: on its own rank, without the forward before step 0."""
    found = Expected(steps=steps(name), micro_batches=micro_batches(name))
    last = stages_of(name) - 1
    for stage in range(last + 1):
        where, ranks = f"{name}.stage{stage}", [rank_of(name, stage)]
        in_block = {"at": (0, where), "ranks": ranks}
        for linear, (out, into) in LINEARS.items():
            module = f"{where}.layers.0." + (linear if linear in ("up", "down") else f"attention.{linear}")
            found.linear(module, (ROWS, TOKENS), into, out, tensors=LINEAR.tensors, **in_block)
        shapes = dict.fromkeys(("query", "key", "value", "output"), (ROWS, HEADS, TOKENS, WIDTH // HEADS))
        found.attention(f"{where}.layers.0.attention", shapes, tensors=ATTENTION.tensors, **in_block)
        found.linear(f"{where}.mix", (ROWS * TOKENS,), WIDTH, WIDTH, tensors=LINEAR.tensors, ranks=ranks)
        if stage == last:
            found.linear(f"{where}.head", (ROWS, TOKENS), WIDTH, WORDS, tensors=LINEAR.tensors, ranks=ranks)
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_is_captured_once_in_each_micro_batch_and_not_in_the_trial(
    captures: Captures, name: str
) -> None:
    oracle = expected(name)
    oracle.check(tapped(captures, name))
    for entry in tapped(captures, name).entries:
        assert (entry.key.layer, entry.key.stack) == oracle.layers[entry.key.module]


@pytest.mark.parametrize("name", SCHEDULES)
def test_forward_and_backward_of_a_micro_batch_belong_together(captures: Captures, name: str) -> None:
    """Also where a zero-bubble schedule computes the gradients of weights later."""
    mine = tapped(captures, name)
    unbiased = mine.without(lambda r: r.call.module.endswith(".mix"))
    biased = mine.without(lambda r: not r.call.module.endswith(".mix"))
    stages, calls = stages_of(name), STEPS * micro_batches(name)

    products = calls * (stages * len(LINEARS) + 1)
    assert check_linear(unbiased) == dict.fromkeys(("Y", "dX", "dW"), products)
    without_output = biased.without(lambda r: r.tensor_name == "output")  # its bias is not captured
    assert check_linear(without_output) == dict.fromkeys(("dX", "dW"), calls * stages)
    compared = check_attention(mine, compute=lambda q, k, v: attention(q, k, v, causal=True), tolerance=1e-5)
    assert compared == dict.fromkeys(("O", "dQ", "dK", "dV"), calls * stages)


@pytest.mark.parametrize("name", rows(["one_f_one_b", "zero_bubble", "interleaved_reentrant"], QUICK))
def test_a_swapped_micro_batch_is_found_out(captures: Captures, name: str) -> None:
    linears = tapped(captures, name).without(lambda r: r.call.layer_type != "linear")
    unbiased = linears.without(lambda r: r.call.module.endswith(".mix"))
    for wrong in controls(unbiased, "input", "grad_output", "grad_weight"):
        with pytest.raises(Mismatch):
            check_linear(wrong)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_stage_receives_is_what_the_one_before_handed_on_in_that_micro_batch(
    captures: Captures, name: str
) -> None:
    for step in steps(name):
        for micro_batch in range(micro_batches(name)):
            at = (step, micro_batch, 0)
            words, _ = batch(step - steps(name).start, micro_batch)
            assert torch.equal(captures.one(f"{name}.stage0", "received", at), words)
            for stage in range(1, stages_of(name)):
                handed_on = captures.one(f"{name}.stage{stage - 1}", "handed_on", at)
                assert torch.equal(captures.one(f"{name}.stage{stage}", "received", at), handed_on)
    spoken = captures.without(lambda r: r.call.module.partition(".")[0] != name or bool(r.call.layer_type))
    assert len(spoken.entries) == 2 * stages_of(name) * STEPS * micro_batches(name), "none in the trial"
