"""Models of Hugging Face transformers, trained for a few steps by Trainer and by plain loops, captured whole.

One process imports transformers and forks a rank for each scenario (transformers_job.py). What their runs must hold
follows from the models' configurations (transformers_expected.py), what the tensors must be from each other
(transformers_oracle.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import capd
from tests.integration.transformers import transformers_oracle as oracle
from tests.integration.transformers.transformers_expected import SCENARIOS
from tests.integration.transformers.transformers_products import (
    BATCH,
    LAYERS,
    MICRO_BATCHES,
    SEQUENCE,
    STEPS,
    tokens,
)
from tests.integration.transformers.transformers_running import Ran, Read, trained
from tests.kit.tiers import rows, rows_wanted

pytestmark = [
    pytest.mark.timeout(900),  # the first test waits for the whole job
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> Iterator[Ran]:
    wanted = rows_wanted(request, "name", NAMED)
    with trained([name for name in (*SCENARIOS, *OTHERS) if name in wanted]) as ran:
        yield ran


@pytest.fixture(scope="module")
def captured(ran: Ran) -> Read:
    return ran.reader()


FAMILIES = ("mixtral", "qwen3_moe")
WAYS = ("grouped_mm", "eager", "batched_mm")
OTHERS = tuple(
    f"{family}-{way}" for family in FAMILIES for way in WAYS[1:]
)  # whose records depend on what the router chose
NAMED = ("sdpa", "tied", "mixtral-grouped_mm", "trainer")
"""Those that tests name which are about one alone."""
QUICK = NAMED
every_scenario = pytest.mark.parametrize("name", rows(SCENARIOS, QUICK))


@every_scenario
def test_every_record_follows_from_the_configuration(name: str, captured: Read) -> None:
    held = captured(name)

    assert held.twice == []
    assert held.series == SCENARIOS[name].expected


@every_scenario
def test_tensors_obey_the_algebra_of_their_products(name: str, captured: Read) -> None:
    scenario = SCENARIOS[name]

    found = oracle.errors(scenario.products, captured(name))

    bounds = {"O = softmax(QKᵀs)V": scenario.attention, "dQ, dK, dV": scenario.gradient, "Y = XWᵀ + b": 1e-6}
    assert {"Y = XWᵀ", "O = softmax(QKᵀs)V", "output = input of the next linear"} <= found.keys()
    assert name == "flex" or {"dX = dYW", "dW = dYᵀX", "dQ, dK, dV"} <= found.keys()
    assert {law: error for law, error in found.items() if error > bounds.get(law, 0.0)} == {}


@every_scenario
def test_losses_are_the_same_with_capture_on_and_off(name: str, ran: Ran) -> None:
    result = ran.result(name)

    assert result["plain"] == result["captured"]
    counters = result["counters"]
    assert (counters["dropped"], counters["in_flight"]) == ({}, 0)
    captures = sum(len(series.records) for series in SCENARIOS[name].expected.values())
    totals = capd.open(ran.store / f"{name}.zarr").totals()
    assert counters["offered"] == captures + totals.scalar_records
    assert bool(totals.scalar_records) == name.startswith("trainer")
    assert "Traceback" not in ran.log(name)


def test_a_trainers_losses_norms_and_rates_come_by_themselves(ran: Ran) -> None:
    store, logged = capd.open(ran.store / "trainer.zarr"), ran.result("trainer")["captured"]

    values = {name: store.scalar(name) for name in store.scalars()}
    # The Trainer rounds what it logs, and evaluates after every step.
    for name, first in (("loss", 0), ("eval_loss", 1)):
        assert [value.hex() for value in values[name].values.tolist()] == logged[first::2]
    assert {name: one.iterations.tolist() for name, one in values.items()} == {
        name: [*range(STEPS)] for name in ("loss", "eval_loss", "grad_norm", "learning_rate")
    } | {"train_loss": [STEPS - 1]}
    assert (values["grad_norm"].values > 0).all()


@pytest.mark.parametrize("name", rows(["sdpa", "trainer", "trainer-compiled", "trainer-reentrant"], QUICK))
def test_every_micro_batch_holds_its_own_data(name: str, captured: Read) -> None:
    """dY of the last product follows from its Y and the labels of that micro-batch."""
    head, worst = captured(name).values, 0.0
    items = MICRO_BATCHES * BATCH * (SEQUENCE - 1)
    for at, logits in head["lm_head", "linear", "output"].items():
        labels = tokens(at[0] * MICRO_BATCHES + at[1])["labels"]
        gradient = head["lm_head", "linear", "grad_output"][at]
        worst = max(worst, oracle.off(gradient, oracle.loss_gradient(logits, labels, items)))

    assert worst < 1e-6


@pytest.mark.parametrize("tensor", ["input", "grad_output"])
def test_the_judge_notices_tensors_of_another_micro_batch(tensor: str, captured: Read) -> None:
    held = captured("sdpa")
    values = held.values["model.layers.1.mlp.up_proj", "linear", tensor]
    first, second = values[0, 0, 0], values[0, 1, 0]
    values[0, 0, 0], values[0, 1, 0] = second, first
    try:
        found = oracle.errors(SCENARIOS["sdpa"].products, held)
    finally:
        values[0, 0, 0], values[0, 1, 0] = first, second

    assert max(found["Y = XWᵀ"], found["dW = dYᵀX"]) > 0.1


def test_the_judge_notices_an_attention_of_another_call(captured: Read) -> None:
    held = captured("sdpa")
    values = held.values["model.layers.1.self_attn", "FA", "key"]
    first = values[0, 0, 0]
    values[0, 0, 0] = values[1, 0, 0]
    try:
        assert oracle.errors(SCENARIOS["sdpa"].products, held)["O = softmax(QKᵀs)V"] > 1e-3
    finally:
        values[0, 0, 0] = first


def test_the_gradient_of_a_tied_weight_is_that_of_both_its_uses(captured: Read) -> None:
    """Beside dYᵀX of the head it holds the embedding's: rows of the tokens that are followed by another one."""
    head = captured("tied").values
    for at, gradient in head["lm_head", "linear", "grad_weight"].items():
        dy, x = (head["lm_head", "linear", name][at] for name in ("grad_output", "input"))
        rest = gradient - dy.flatten(0, 1).T @ x.flatten(0, 1)
        embedded = tokens(at[0] * MICRO_BATCHES + at[1])["input_ids"][:, :-1].unique()
        touched = rest.abs().amax(1) > 1e-6 * gradient.abs().max()
        assert set(touched.nonzero().flatten().tolist()) == set(embedded.tolist())


@pytest.mark.parametrize("name", rows(["whisper"], QUICK))
def test_attributes_say_how_attention_lays_its_tensors_out(name: str, captured: Read) -> None:
    attributes = captured(name).attributes

    for name in ("query", "output", "grad_output"):
        found = attributes["model.decoder.layers.0.encoder_attn", "FA", name]
        assert (found["layout"], found["output_layout"]) == ("bhsd", "bshd")


@pytest.mark.parametrize("name", rows(["trainer-bf16"], QUICK))
def test_under_autocast_tensors_have_the_dtype_of_the_product(name: str, captured: Read) -> None:
    operands = {"input", "weight", "output", "grad_output", "query", "key", "value"}

    for (module, _, operand), tensors in captured(name).values.items():
        if operand in operands:
            assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}, (module, operand)


BLOCKS = [f"model.layers.{layer}.mlp" for layer in range(LAYERS)]


def every_family(way: str) -> pytest.MarkDecorator:
    """The scenarios of all families whose experts are computed in this way."""
    return pytest.mark.parametrize("name", rows([f"{family}-{way}" for family in FAMILIES], QUICK))


@every_family("grouped_mm")
@pytest.mark.parametrize("block", BLOCKS)
def test_experts_rows_are_those_that_the_router_sent(block: str, captured: Read, name: str) -> None:
    held = captured(name)
    moments = held.values[f"{block}.gate", "linear", "output"]

    assert [oracle.routed(held, block, at) for at in moments] == [(0.0, 0.0)] * (STEPS * MICRO_BATCHES)


def test_experts_without_rows_are_recorded_as_such(captured: Read) -> None:
    held, empty = captured("mixtral-grouped_mm").values, 0
    for block in BLOCKS:
        for at, ends in held[f"{block}.experts.gate_up_proj", "grouped_linear", "offsets"].items():
            rows = ends.diff(prepend=torch.zeros(1, dtype=ends.dtype))
            gradient = held[f"{block}.experts.gate_up_proj", "grouped_linear", "grad_weight"][at]
            assert not gradient[rows == 0].any()
            assert gradient[rows > 0].any()
            empty += int((rows == 0).sum())

    assert empty > 0


@every_family("eager")
@pytest.mark.parametrize("block", BLOCKS)
def test_an_eager_expert_has_records_of_its_own(block: str, captured: Read, name: str) -> None:
    """One for each expert that got rows, which its metadata names; the rows are those that the router sent it."""
    held, module = captured(name), f"{block}.experts.gate_up_proj"
    found = {key[2]: values for key, values in held.values.items() if key[0] == module}
    assert "offsets" not in found
    seen: dict[tuple[int, int], set[int]] = {}
    for at, x in found["input"].items():
        expert = held.metadata[module, "grouped_linear", "input"][at]["expert"]
        weight = found["weight"][at[0], 0, 0][expert]
        router = held.values[f"{block}.gate", "linear", "input"][at[0], at[1], 0]
        sent = oracle.chosen(held, block, (at[0], at[1], 0)) == expert
        positions, tokens = sent.T.nonzero(as_tuple=True)
        assert len(positions) == len(x) > 0
        assert torch.equal(x, router[tokens])
        assert torch.equal(found["output"][at], x @ weight.T)
        assert torch.equal(found["grad_input"][at], found["grad_output"][at] @ weight)
        seen.setdefault(at[:2], set()).add(expert)
    for (iteration, micro_batch), experts in seen.items():
        assert experts == set(oracle.chosen(held, block, (iteration, micro_batch, 0)).flatten().tolist())


@every_family("batched_mm")
@pytest.mark.parametrize("block", BLOCKS)
def test_batched_experts_compute_the_tokens_choices_in_order(block: str, captured: Read, name: str) -> None:
    held, module = captured(name), f"{block}.experts.down_proj"
    found = {key[2]: values for key, values in held.values.items() if key[0] == module}
    for at, x in found["input"].items():
        weights = found["weight"][at[0], 0, 0][oracle.chosen(held, block, at).flatten()]
        assert oracle.off(found["output"][at], torch.einsum("si,soi->so", x, weights)) < 1e-6
        assert (
            oracle.off(found["grad_input"][at], torch.einsum("so,soi->si", found["grad_output"][at], weights))
            < 1e-6
        )
    assert len(found["input"]) == STEPS * MICRO_BATCHES


@pytest.mark.parametrize("name", rows(OTHERS, QUICK))
def test_losses_of_other_experts_are_the_same_with_capture_on_and_off(name: str, ran: Ran) -> None:
    result = ran.result(name)

    assert result["plain"] == result["captured"]
    assert (result["counters"]["dropped"], result["left"]) == ({}, [])


@every_scenario
def test_remove_leaves_transformers_as_it_was(name: str, ran: Ran) -> None:
    assert ran.result(name)["left"] == []
