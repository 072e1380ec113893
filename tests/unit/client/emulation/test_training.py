"""Emulated models under what training loops do to them: checkpointing, and capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from capd_client import emulate, watch
from capd_client.watching import watch as watch_calls
from tests.kit.client.models import non_reentrant, reentrant, selective
from tests.kit.client.sink import MemorySink
from tests.kit.emulated.models import RECIPES, Model, inputs, same, step, twin
from tests.kit.tiers import rows


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemorySink]:
    """The session that `watch` finds; afterwards no tap may have failed."""
    memory = MemorySink()
    monkeypatch.setattr(watch_calls, "session", lambda: memory)
    yield memory
    assert memory.errors == []


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("wrap", rows([reentrant, non_reentrant, selective], [non_reentrant, selective]))
@pytest.mark.parametrize("where", rows(["outer", "inner"], ["inner"]))
def test_checkpointed_segments_are_repeated_with_the_same_numbers(
    recipe: dict[str, str], wrap: Callable[..., Any], where: str
) -> None:
    model = Model()
    checkpointed = twin(model, **{where: wrap})
    plain = step(model, inputs())

    emulate(model, recipe)
    emulate(checkpointed, recipe)

    expected = step(model, inputs())
    assert same(step(checkpointed, inputs()), expected)
    assert not same(plain, expected)


def test_what_is_rounded_at_random_is_repeated_with_the_same_random_numbers() -> None:
    recipe = {"linear": {"format": "mxfp4", "rounding": "stochastic", "backward": "none"}}
    module, x = nn.Linear(32, 32), inputs()
    emulate(module, recipe)

    def gradient(wrap: Callable[..., Any]) -> Tensor:
        torch.manual_seed(4)
        y = wrap(lambda t: torch.exp(module(t)), x)  # its derivative is its result, as the second pass has it
        return torch.autograd.grad(y.sum(), x, allow_unused=True)[0]

    assert torch.equal(gradient(non_reentrant), gradient(lambda function, t: function(t)))


def watched(model: nn.Module, recipe: Any, order: str) -> list[Any]:
    """Watch and emulate in this order; what ends them."""
    begin: dict[str, Callable[[], Any]] = {
        "watch": lambda: watch(model),
        "emulate": lambda: emulate(model, recipe),
    }
    return [begin[name]() for name in order.split(", ")]


@pytest.mark.parametrize("order", ["watch, emulate", "emulate, watch"])
@pytest.mark.parametrize("end", rows(["first", "last"], ["first"]))
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_capture_has_the_raw_operands_and_the_emulated_results(
    sink: MemorySink, order: str, end: str, recipe: dict[str, str]
) -> None:
    model = Model()
    seen: dict[str, Tensor] = {}
    layer: Any = model.layers[0]
    layer.qkv.register_forward_hook(lambda _, args, y: seen.update(x=args[0].detach(), y=y.detach()))
    layer.out.register_forward_pre_hook(lambda _, args: seen.update(o=args[0].detach()))

    ending = watched(model, recipe, order)
    step(model, inputs())
    for one in ending if end == "first" else reversed(ending):
        one.remove()

    q, k, v = (t.view(2, 7, 2, 16).transpose(1, 2) for t in seen["y"].chunk(3, -1))
    assert torch.equal(sink.one("layers.0.qkv", "input"), seen["x"])
    assert torch.equal(sink.one("layers.0.qkv", "weight"), layer.qkv.weight)
    assert torch.equal(sink.one("layers.0.qkv", "output"), seen["y"])
    assert not torch.equal(seen["y"], functional.linear(seen["x"], layer.qkv.weight, layer.qkv.bias))
    for name, operand in (("query", q), ("key", k), ("value", v)):
        assert torch.equal(sink.one("layers.0", name), operand)
    assert torch.equal(sink.one("layers.0", "output").transpose(1, 2).flatten(2), seen["o"])
    assert torch.equal(sink.one("layers.0.up", "weight"), layer.up.weight)
    assert {captured.attributes["emulation"] for captured in sink.captured} == {
        ending[order == "watch, emulate"].recipe.text()
    }


@pytest.mark.parametrize("order", ["watch, emulate", "emulate, watch"])
def test_multihead_attention_computes_the_same_while_it_is_captured(sink: MemorySink, order: str) -> None:
    module = nn.MultiheadAttention(32, 2, batch_first=True)
    x = inputs()
    with emulate(module, "mxfp8"):
        expected, _ = module(x, x, x, need_weights=False)

    ending = watched(module, "mxfp8", order)
    found, _ = module(x, x, x, need_weights=False)
    for one in ending:
        one.remove()

    assert torch.equal(found, expected)
    name = "MultiheadAttention"
    assert torch.equal(sink.one(f"{name}.in_proj", "input"), x.transpose(0, 1))
    packed = sink.one(f"{name}.in_proj", "output")
    assert torch.equal(
        sink.one(name, "query").transpose(1, 2).flatten(2), packed.chunk(3, -1)[0].transpose(0, 1)
    )
