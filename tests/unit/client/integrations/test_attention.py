"""Attention that a module computes by F.scaled_dot_product_attention is tapped under that module."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from capd_client.protocol.kinds import ATTENTION
from capd_client.watching.watch import watch
from tests.kit.client.compiled_models import COMPILING
from tests.kit.client.sink import MemorySink
from tests.kit.tiers import rows

pytestmark = COMPILING

HEADS, WIDTH = 2, 8


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        return F.scaled_dot_product_attention(query, key, value=value).transpose(1, 2).flatten(2)


class ThroughHelper(Direct):
    def forward(self, x: Tensor) -> Tensor:
        return attend(*self.heads(x)).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Direct(), ThroughHelper()])
        self.head = nn.Linear(WIDTH, 1)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return self.head(x).sum()


def as_it_is(model: nn.Module) -> Any:
    return model


def whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def by_layer(model: Any) -> Any:
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    return model


def with_break(model: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return model(x)

    return torch.compile(forward, backend="aot_eager")


WAYS = [as_it_is, whole, by_layer, with_break]


@pytest.mark.parametrize("recompute", rows([False, True], [True]))
@pytest.mark.parametrize("way", rows(WAYS, [as_it_is, whole]))
def test_attention_is_captured_under_the_module_that_calls_it(
    sink: MemorySink, way: Callable[[nn.Module], Any], recompute: bool
) -> None:
    model = Model(recompute)
    watch(model, tensors=ATTENTION.tensors, steps="all", select="layers.[01]")
    run = way(model)
    for _ in range(2):
        run(torch.randn(3, 5, WIDTH)).backward()
    found = {(c.key.module, c.moment.micro_batch, c.moment.call, c.key.tensor_name): c for c in sink.captured}
    assert len(found) == len(sink.captured)
    assert {key[:3] for key in found} == {(f"layers.{n}", m, 0) for n in (0, 1) for m in (0, 1)}
    for (module, micro_batch, call, name), capture in found.items():
        assert capture.key.layer == int(module[-1])
        assert (capture.key.layer_type, capture.key.component) == ("attention", "FA")
        if name != "output":
            continue
        of = {
            n: found[module, micro_batch, call, n].value.detach().requires_grad_()
            for n in ("query", "key", "value")
        }
        result = F.scaled_dot_product_attention(*of.values(), is_causal=module == "layers.1")
        assert torch.equal(result, capture.value)
        result.backward(found[module, micro_batch, call, "grad_output"].value)
        for n, operand in of.items():
            assert torch.equal(found[module, micro_batch, call, f"grad_{n}"].value, operand.grad)


def test_a_module_watched_in_parts_gives_each_part_once(sink: MemorySink) -> None:
    model = Model()
    watch(model, select="layers.[01]", steps="all")
    watch(model, select=["*.qkv", "head"], steps="all")
    model(torch.randn(3, 5, WIDTH)).backward()
    names = [(c.key.module, c.key.tensor_name) for c in sink.captured]
    assert len(names) == len(set(names)) == 2 * 5 + 3 * 4


def test_copies_and_evaluations_are_not_captured(sink: MemorySink) -> None:
    model = Model()
    watch(model, steps="all")
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))  # noqa: S301
    for other in (copied, loaded, model.eval()):
        other(torch.randn(3, 5, WIDTH)).backward()
    assert sink.captured == []


def test_a_call_that_raises_leaves_no_owner_behind(sink: MemorySink) -> None:
    model = Model()
    watch(model, steps="all", select="layers.[01]")
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 5, WIDTH + 1))
    attend(*torch.randn(3, 1, 1, 4, 4))
    assert sink.captured == []


def test_remove_puts_the_function_back(sink: MemorySink) -> None:
    original = F.scaled_dot_product_attention
    first, second = watch(Model()), watch(Model())
    assert F.scaled_dot_product_attention is not original
    first.remove()
    assert F.scaled_dot_product_attention is not original
    second.remove()
    assert F.scaled_dot_product_attention is original


def test_torchtitan_s_flex_attention_is_captured_by_its_arguments_and_result(sink: MemorySink) -> None:
    """Whatever it calls inside: here a product that no tap knows."""

    class FlexAttention(nn.Module):
        def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, scale: float = 1.0) -> Tensor:
            return q_BLNH * k_BLNH + scale * v_BLNH

    FlexAttention.__module__ = "torchtitan.models.common.attention"
    model = nn.ModuleDict({"inner_attention": type("Fused", (FlexAttention,), {})()})
    model.forward = lambda q, k, v: model["inner_attention"](q, k, v, scale=2.0)  # type: ignore[assignment]
    watch(model, tensors=ATTENTION.tensors)
    q, k, v = (torch.randn(2, 3, 4, 5, requires_grad=True) for _ in range(3))

    model(q, k, v).sum().backward()

    found = {name: sink.one("inner_attention", name) for name in ATTENTION.tensors}
    assert all(torch.equal(found[name], x) for name, x in (("query", q), ("key", k), ("value", v)))
    assert torch.equal(found["output"], q * k + 2 * v)
    assert torch.equal(found["grad_query"], k)
    assert torch.equal(found["grad_value"], 2 * found["grad_output"])
    assert {c.attributes["layout"] for c in sink.captured if c.attributes} == {"bshd"}
