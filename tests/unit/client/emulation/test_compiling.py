"""Emulated models in compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capd_client import emulate
from tests.kit.client.compiled_models import COMPILING
from tests.kit.client.models import non_reentrant
from tests.kit.emulated.models import RECIPES, Layer, Model, inputs, step
from tests.kit.tiers import rows

pytestmark = [
    *COMPILING,
    pytest.mark.filterwarnings("ignore:.*autograd.*should not be instantiated:DeprecationWarning"),
]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("form", rows(["whole", "checkpointed", "by layer"], ["checkpointed"]))
def test_compiled_graphs_compute_the_same_in_one_piece(recipe: dict[str, str], form: str) -> None:
    model = Model(outer=non_reentrant if form == "checkpointed" else None)
    emulate(model, recipe)
    expected = step(model, inputs())

    if form == "by layer":
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        found = step(model, inputs())
    else:
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        found = step(compiled, inputs())

    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_a_layer_after_the_other_shares_one_graph_and_an_emulation_that_ends_is_noticed() -> None:
    layers = nn.ModuleList(Layer() for _ in range(12))
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for layer in layers:
        layer.compile(backend=backend, fullgraph=True)

    def forward() -> Tensor:
        x = inputs()
        for layer in layers:
            x = layer(x)
        return x

    with emulate(layers, "mxfp4"):
        while_emulated = forward()
        assert len(graphs) <= 3
    plain = forward()

    x = inputs()
    for layer in layers:
        x = layer.forward(x)
    assert torch.equal(plain, x)
    assert not torch.equal(while_emulated, plain)


@pytest.mark.slow
def test_inductor_compiles_it() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    emulate(model, "mxfp8")
    expected = step(model, inputs())

    compiled: Any = torch.compile(model, fullgraph=True)
    found = step(compiled, inputs())

    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def multihead(x: Tensor, module: nn.Module) -> Tensor:
    return module(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("first", rows([True, False], [True]), ids=["the first to compile", "a later one"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_products_inside_of_multihead_attention_are_emulated_in_graphs(
    recipe: dict[str, str], first: bool
) -> None:
    from torch._dynamo import trace_rules

    table = trace_rules.get_torch_obj_rule_map
    module, x = nn.MultiheadAttention(32, 2), inputs()
    plain = multihead(x, module)
    if first:
        table.cache_clear()  # of the functions that it does not trace, made at the first compilation
    try:
        with emulate(module, recipe):
            expected = multihead(x, module)
            compiled: Any = torch.compile(multihead, backend="aot_eager", fullgraph=True)
            found = compiled(x, module)
    finally:
        if first:
            table.cache_clear()

    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, plain)
    torch.testing.assert_close(compiled(x, module), plain)


def conv1d() -> Any:
    return pytest.importorskip("transformers.pytorch_utils").Conv1D


@pytest.mark.parametrize("kind_of", rows([lambda: nn.Linear, conv1d], [conv1d]), ids=["Linear", "Conv1D"])
def test_what_was_compiled_and_has_run_before_is_emulated(kind_of: Any) -> None:
    kind = kind_of()
    model = nn.Sequential(kind(32, 32), nn.Tanh(), kind(32, 32))
    compiled: Any = torch.compile(model, backend="aot_eager")
    x = inputs()
    plain = compiled(x)

    for _ in range(2):
        with emulate(model, "mxfp4"):
            torch.testing.assert_close(compiled(x), model(x))
            assert not torch.allclose(compiled(x), plain)
        torch.testing.assert_close(compiled(x), plain)


@pytest.mark.slow
def test_a_thread_that_has_emulated_nothing_yet_compiles_once_and_again() -> None:
    model = Model()
    compiled: Any = torch.compile(model, backend="aot_eager")

    def run() -> list[Tensor]:
        found = [compiled(inputs())]
        with torch.no_grad():  # another graph
            found.append(compiled(inputs()))
        return found

    with emulate(model, "mxfp4"), ThreadPoolExecutor(1) as threads:
        found = threads.submit(run).result()
        expected = model(inputs())

    for one in found:
        torch.testing.assert_close(one, expected)


@pytest.mark.parametrize("name", ["nvfp4-te", pytest.param("mxfp4-rht-sr", marks=pytest.mark.slow)])
def test_a_recipe_by_products_is_compiled_whole(name: str) -> None:
    module, x = nn.Linear(128, 64), torch.randn(256, 128, requires_grad=True)
    emulate(module, name)
    compiled: Callable[[Tensor], Tensor] = torch.compile(module, backend="aot_eager", fullgraph=True)

    y = compiled(x)
    gradients = torch.autograd.grad(y.sum(), [x, module.weight])

    assert torch.equal(y, module(x))
    assert all(gradient.isfinite().all() for gradient in gradients)
