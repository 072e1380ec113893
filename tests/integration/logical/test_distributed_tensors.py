"""TP2 × FSDP2 on four ranks: whole tensors are what `full_tensor()` says, bit for bit, uneven and empty parts too."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import capd
from tests.integration.logical.dtensor_job import HIDDEN, NARROW, WIDTH
from tests.kit.jobs.products import assert_products_hold
from tests.kit.launching import run_ranks

JOB = Path(__file__).with_name("dtensor_job.py")
pytestmark = pytest.mark.timeout(300)


class Dealt(NamedTuple):
    """What the ranks captured, and what they said that it is, by rank and name."""

    store: Any
    told: list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def dealt() -> Iterator[Dealt]:
    with tempfile.TemporaryDirectory(prefix="capd-logical-") as name:
        run = run_ranks(JOB, 4, Path(name))
        assert_products_hold(run)
        store = capd.open(run)
        told = [torch.load(Path(name) / f"told.{rank}.pt", weights_only=True) for rank in range(4)]
        yield Dealt(store, told)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits; zeros of different sign differ."""
    bits = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


@pytest.mark.parametrize("kind", ["sharded", "gradient", "activation", "dealt"])
def test_every_distributed_tensor_is_put_together_bit_for_bit(dealt: Dealt, kind: str) -> None:
    names = {name for name in dealt.told[0] if name.startswith(f"{kind}.")}
    assert len(names) == {"sharded": 8, "gradient": 8, "activation": 2, "dealt": 18}[kind]
    for name in names:
        found = dealt.store.logical(module=name, tensor_name="part")
        # Data parallel ranks have other activations.
        assert [one.coordinates for one in found] == (
            [{"dp": 0}, {"dp": 1}] if kind == "activation" else [{}]
        )
        for one in found:
            [moment] = one.moments
            whole = dealt.told[2 * one.coordinates.get("dp", 0)][name]
            assert same_bits(one.torch(moment), whole), one
            assert one.spread == 0.0
            assert one.missing == []


def test_parts_are_uneven_and_some_are_empty(dealt: Dealt) -> None:
    """Without them the test above would prove less."""
    shapes = {
        name: [one.records[0].shape for one in dealt.store.find(module=f"sharded.{name}.weight")]
        for name in ("up", "narrow")
    }
    assert sorted(shapes["up"]) == [(2, WIDTH)] * 2 + [(3, WIDTH)] * 2
    assert sorted(shapes["narrow"]) == [(0, WIDTH)] * 2 + [(1, WIDTH)] * 2


def test_terms_of_a_sum_and_of_a_mean_are_the_reduced_tensor(dealt: Dealt) -> None:
    for reduction in ("sum", "avg"):
        for found in dealt.store.logical(module=f"term.{reduction}"):
            whole = dealt.told[2 * found.coordinates["dp"]][f"term.{reduction}"]
            assert torch.equal(found.torch(0), whole)


def test_products_of_the_model_are_whole_products(dealt: Dealt) -> None:
    """The watch's own tensors: the weights are FSDP's gathered ones, so data parallel ranks have replicas."""
    for name, shape in (("up", (HIDDEN, WIDTH)), ("down", (WIDTH, HIDDEN)), ("narrow", (NARROW, WIDTH))):
        [weight] = dealt.store.logical(module=name, tensor_name="weight")
        assert weight.shape(0) == shape
        assert same_bits(weight.torch(0), dealt.told[0][f"sharded.{name}.weight"])
        assert weight.spread == 0.0
        assert {part.rank for part in weight.parts} == {0, 1, 2, 3}
        gradients = dealt.store.logical(module=name, tensor_name="grad_weight")
        assert [one.coordinates for one in gradients] == [{"dp": 0}, {"dp": 1}]
        for found in gradients:
            at = {"module": name, "rank": 2 * found.coordinates["dp"]}
            [x] = dealt.store.logical(**at, tensor_name="input")
            [dy] = dealt.store.logical(**at, tensor_name="grad_output")
            expected = dy.torch(0).t() @ x.torch(0)
            torch.testing.assert_close(found.torch(0), expected, rtol=1e-5, atol=1e-5)
        mean = (gradients[0].torch(0) + gradients[1].torch(0)) / 2
        torch.testing.assert_close(mean, dealt.told[0][f"gradient.{name}.weight"], rtol=1e-5, atol=1e-5)
