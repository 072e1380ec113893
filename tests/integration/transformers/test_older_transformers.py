"""Models of transformers 4, trained and captured as in test_transformers.py, and judged by the same oracle.

CAPD_TEST_TRANSFORMERS names directories with versions before 5 (pip install --target), separated by colons: the slow
tier runs all scenarios on each. What is captured of BERT, T5 and experts is another thing there: docs/frameworks.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.integration.transformers import transformers_models as models
from tests.integration.transformers import transformers_oracle as oracle
from tests.integration.transformers import transformers_stacks as stacks
from tests.integration.transformers.transformers_expected import SCENARIOS, Scenario, of
from tests.integration.transformers.transformers_products import (
    BATCH,
    EXPERTS,
    LAYERS,
    MICRO_BATCHES,
    SEQUENCE,
    STEPS,
    TOP_K,
    Product,
)
from tests.integration.transformers.transformers_running import Ran, Read, trained

VERSIONS = tuple(filter(None, os.environ.get("CAPD_TEST_TRANSFORMERS", "").split(":")))

pytestmark = [pytest.mark.fault, pytest.mark.timeout(900), pytest.mark.usefixtures("one_thread")]


def _bert() -> list[Product]:
    """It calls F.scaled_dot_product_attention itself, whose output has its heads in front."""
    return [_heads_first(p) if p.component == "FA" else p for p in stacks.bert().products]


def _heads_first(product: Product) -> Product:
    batch, queries, heads, size = product.shapes["output"]
    return replace(
        product, shapes={**product.shapes, "output": (batch, heads, queries, size)}, heads_first=True
    )


def _t5() -> list[Product]:
    """Its attention is two products that nobody sees."""
    return [product for product in stacks.t5().products if product.component != "FA"]


OLDER: dict[str, Scenario] = {
    **{
        name: SCENARIOS[name]
        for name in ("sdpa", "eager", "tied", "copied", "generating", "gpt2", "trainer", "trainer-bf16")
    },
    **{name: SCENARIOS[name] for name in ("trainer-reentrant", "trainer-non-reentrant")},
    "bert": of(_bert()),
    "t5": of(_t5()),
    "trainer-seq2seq": of(_t5()),
    "mixtral": of(models.listed_mixtral()),
}
"""The experts of Mixtral are beside it: their rows depend on what the router chose."""
BLOCKS = [f"model.layers.{layer}.block_sparse_moe" for layer in range(LAYERS)]
every_scenario = pytest.mark.parametrize("name", OLDER)


@pytest.fixture(scope="module", params=VERSIONS)
def ran(request: pytest.FixtureRequest) -> Iterator[Ran]:
    with trained(OLDER, request.param) as ran:
        yield ran


@pytest.fixture(scope="module")
def captured(ran: Ran) -> Read:
    return ran.reader()


@every_scenario
def test_every_record_follows_from_the_configuration(name: str, captured: Read) -> None:
    held = captured(name)

    assert held.twice == []
    found = {key: series for key, series in held.series.items() if ".experts." not in key[0]}
    assert found == OLDER[name].expected


@every_scenario
def test_tensors_obey_the_algebra_of_their_products(name: str, captured: Read) -> None:
    scenario = OLDER[name]

    found = oracle.errors(scenario.products, captured(name))

    bounds = {"O = softmax(QKᵀs)V": scenario.attention, "dQ, dK, dV": scenario.gradient, "Y = XWᵀ + b": 1e-6}
    assert {"Y = XWᵀ", "dX = dYW", "dW = dYᵀX"} <= found.keys()
    assert scenario.products == _t5() or {"O = softmax(QKᵀs)V", "dQ, dK, dV"} <= found.keys()
    assert {law: error for law, error in found.items() if error > bounds.get(law, 0.0)} == {}


@every_scenario
def test_losses_are_the_same_and_nothing_is_dropped_or_left(name: str, ran: Ran) -> None:
    result = ran.result(name)

    assert result["plain"] == result["captured"]
    assert (result["counters"]["dropped"], result["counters"]["in_flight"], result["left"]) == ({}, 0, [])
    assert "Traceback" not in ran.log(name)


@pytest.mark.parametrize("block", BLOCKS)
def test_an_expert_has_the_rows_that_the_router_sent(block: str, captured: Read) -> None:
    held, rows = captured("mixtral").values, 0
    for expert in range(EXPERTS):
        for part in ("w1", "w2", "w3"):
            found = {key[2]: v for key, v in held.items() if key[0] == f"{block}.experts.{expert}.{part}"}
            for at, x in found.get("input", {}).items():
                [weight] = [w for kept, w in found["weight"].items() if kept[0] == at[0]]  # of its first call
                gradient = found["grad_output"][at]
                assert torch.equal(found["output"][at], x @ weight.T)
                assert torch.equal(found["grad_input"][at], gradient @ weight)
                assert torch.equal(found["grad_weight"][at], gradient.T @ x)
                if part == "w1":
                    sent = (oracle.chosen(captured("mixtral"), block, at) == expert).any(1)
                    router = held[f"{block}.gate", "linear", "input"][at].flatten(0, -2)
                    assert torch.equal(x.sort(0).values, router[sent].sort(0).values)
                    rows += len(x)
    assert rows == BATCH * SEQUENCE * TOP_K * STEPS * MICRO_BATCHES
