"""Inside compiled graphs the taps take what they take without, once per call, and compile nothing twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from capd_client import watch
from capd_client.protocol.kinds import LINEAR
from tests.kit.client.compiled_models import COMPILING, Regional, Step, equal, reference, same, train
from tests.kit.client.models import MLP, Blocks, Projections, Repeated, non_reentrant, reentrant, selective
from tests.kit.client.sink import MemorySink
from tests.kit.tiers import rows

pytestmark = COMPILING


MODELS = {
    "mlp": partial(MLP, dropout=0.3),
    "shared-input": Projections,
    "calls": Repeated,
    "reentrant": partial(Blocks, reentrant),
    "non-reentrant": partial(Blocks, non_reentrant),
}


@pytest.mark.parametrize("backend", rows(["eager", "aot_eager"], ["aot_eager"]))
@pytest.mark.parametrize("name", rows(MODELS, ["mlp", "calls", "non-reentrant"]))
def test_a_compiled_model_gives_what_it_gives_uncompiled(sink: MemorySink, backend: str, name: str) -> None:
    model = MODELS[name]()
    torch.manual_seed(5)
    expected, results = reference(sink, model)
    watch(model, tensors=LINEAR.tensors)
    counter = CompileCounterWithBackend(backend)

    torch.manual_seed(5)
    assert equal(train(torch.compile(model, backend=counter, fullgraph=True), model), results)

    same(sink.captured, expected)
    assert counter.frame_count == 1


@pytest.mark.fault
def test_the_default_backend_too(sink: MemorySink) -> None:
    model = Blocks(non_reentrant)
    bare = copy.deepcopy(model)
    expected, _ = reference(sink, model)
    results = train(torch.compile(bare, fullgraph=True), bare)
    torch.compiler.reset()
    watch(model, tensors=LINEAR.tensors)

    torch.testing.assert_close(train(torch.compile(model, fullgraph=True), model), results)

    same(sink.captured, expected, exact=False)


@pytest.mark.parametrize("nested", rows([False, True], [True]))
@pytest.mark.parametrize("wrap", rows([None, reentrant, non_reentrant, selective], [None, non_reentrant]))
@pytest.mark.parametrize("backend", rows(["eager", "aot_eager"], ["aot_eager"]))
def test_blocks_compiled_one_by_one_give_the_same(
    sink: MemorySink, backend: str, wrap: Any, nested: bool
) -> None:
    model = Regional(wrap, nested=nested)
    expected, results = reference(sink, model)
    watch(model, tensors=LINEAR.tensors)
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)

    assert equal(train(model, model), results)

    same(sink.captured, expected)


def compiled_whole(model: nn.Module, watched: Callable[[nn.Module], object]) -> Step:
    watched(model)
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def compiled_before(model: nn.Module, watched: Callable[[nn.Module], object]) -> Step:
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    watched(model)
    return compiled


def compiled_then_watched_through_the_wrapper(
    model: nn.Module, watched: Callable[[nn.Module], object]
) -> Step:
    compiled: nn.Module = torch.compile(model, backend="aot_eager", fullgraph=True)
    watched(compiled)
    return compiled


def compiled_in_place(model: nn.Module, watched: Callable[[nn.Module], object]) -> Step:
    model.compile(backend="aot_eager", fullgraph=True)
    watched(model)
    return model


def inside_a_compiled_function(model: nn.Module, watched: Callable[[nn.Module], object]) -> Step:
    watched(model)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        return model(x) + 0.0

    return step


def with_a_graph_break(model: nn.Module, watched: Callable[[nn.Module], object]) -> Step:
    watched(model)
    model.fc2.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    return torch.compile(model, backend="aot_eager")


@pytest.mark.parametrize(
    "way",
    rows(
        [
            compiled_whole,
            compiled_before,
            compiled_then_watched_through_the_wrapper,
            compiled_in_place,
            inside_a_compiled_function,
            with_a_graph_break,
        ],
        [compiled_before, with_a_graph_break],
    ),
)
def test_however_it_is_compiled(
    sink: MemorySink, way: Callable[..., Step], caplog: pytest.LogCaptureFixture
) -> None:
    model = MLP()
    expected, results = reference(sink, model)

    call = way(model, partial(watch, tensors=LINEAR.tensors))

    assert equal(train(call, model), results)
    same(sink.captured, expected)
    assert "are not captured" not in caplog.text


def test_a_step_that_is_not_captured_compiles_nothing_and_captures_nothing(sink: MemorySink) -> None:
    model = MLP()
    watch(model, steps="1,3")
    counter = CompileCounterWithBackend("aot_eager")

    train(torch.compile(model, backend=counter, fullgraph=True), model, steps=5)

    assert counter.frame_count == 1
    assert {c.moment.iteration for c in sink.captured} == {1, 3}


def test_a_removed_watch_leaves_inert_graphs_and_compiles_once_more_at_most(sink: MemorySink) -> None:
    model = MLP()
    handle = watch(model, tensors=LINEAR.tensors)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    loss = compiled(torch.randn(2, 5, 6)).sum()
    sink.captured.clear()

    handle.remove()
    loss.backward()
    train(compiled, model)

    assert sink.captured == []
    assert counter.frame_count <= 2


def test_a_watch_in_the_place_of_another_is_seen(sink: MemorySink) -> None:
    model = MLP()
    handle = watch(model, tensors=["input"])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(2, 5, 6))
    sink.captured.clear()

    handle.remove()
    watch(model, tensors=["output", "grad_input"])
    compiled(torch.randn(2, 5, 6)).sum().backward()

    assert sink.names() == {"output": 2, "grad_input": 1}  # the first input needs no gradient


def test_only_what_was_asked_for_is_in_the_graph(sink: MemorySink) -> None:
    model = MLP()
    watch(model, tensors=["output"])

    train(torch.compile(model, backend="aot_eager", fullgraph=True), model, steps=1)

    assert sink.names() == {"output": 4}


@pytest.mark.parametrize("part", rows(["", "fc1"], [""]))  # the root, or one of its modules
def test_an_eval_pass_and_one_without_gradients_leave_no_trace(sink: MemorySink, part: str) -> None:
    model = MLP()
    watch(model)
    module = model.get_submodule(part)
    module.compile(backend="aot_eager", fullgraph=True)

    def train() -> None:
        model(torch.randn(2, 6)).sum().backward()

    train()
    model.eval()
    model(torch.randn(2, 6))
    model.train()
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            model(torch.randn(2, 6))
        train()

    expected = [(0, m, 0) for m in range(3)]
    for name in ("input", "output", "grad_output"):
        assert [c.at for c in sink.of("fc1", name)] == expected
        assert [c.at for c in sink.of("fc2", name)] == expected


@pytest.mark.parametrize("inside", rows([False, True], [True]))
def test_autocast_operands_are_recorded_as_the_product_used_them(sink: MemorySink, inside: bool) -> None:
    model = MLP()
    watch(model)
    x = torch.randn(2, 6)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            return model(x)

    call = torch.compile(forward if inside else model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
        call(x).sum().backward()

    assert torch.equal(sink.one("fc1", "input"), x.bfloat16())
    assert torch.equal(sink.one("fc1", "weight"), model.fc1.weight.bfloat16())
    assert sink.of("fc1", "input")[0].attributes == {
        "cast_from": "float32", "class": "Linear", "emulation": "none",
    }  # fmt: skip
    assert sink.one("fc2", "grad_output").dtype == torch.bfloat16


def test_changing_shapes_are_captured_as_they_are(sink: MemorySink) -> None:
    model = MLP()
    watch(model, steps="all")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)

    for length in (2, 3, 5, 7):
        compiled(torch.randn(length, 4, 6)).sum().backward()

    assert [c.value.shape[0] for c in sink.of("fc1", "grad_output")] == [2, 3, 5, 7]
    assert counter.frame_count == 2  # as without capd: once for 2 rows, once for any number


def test_what_is_told_of_a_tensor_is_what_it_was_outside_the_graph(sink: MemorySink) -> None:
    model = MLP()
    watch(model)

    torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(2, 6)).sum().backward()

    told = {(c.key.module, c.key.tensor_name): c.requires_grad for c in sink.captured}
    assert told == {
        ("fc1", "input"): False, ("fc1", "weight"): True, ("fc1", "output"): True, ("fc1", "grad_output"): False,
        ("fc2", "input"): True, ("fc2", "weight"): True, ("fc2", "output"): True, ("fc2", "grad_output"): False,
    }  # fmt: skip


def test_an_exported_program_holds_nothing_of_capd(sink: MemorySink) -> None:
    model = MLP()
    watch(model)

    program = torch.export.export(model, (torch.randn(2, 6),), strict=True)

    assert "capd" not in str(program.graph)
