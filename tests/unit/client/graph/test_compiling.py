"""Whatever torch cannot compile with taps, or compiles before or around them, trains as ever, and is said."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from capd_client import watch
from capd_client.graph import operators, taps
from capd_client.process.log import RateLimitedLog
from capd_client.protocol.control import Steer
from capd_client.protocol.kinds import LINEAR
from capd_client.protocol.selection import Selection
from capd_client.tensors.inspect import without_modes
from capd_client.watching.attach import WatchHandle
from tests.kit.client.compiled_models import (
    COMPILING,
    Block,
    Regional,
    Step,
    equal,
    reference,
    same,
    taken,
    train,
)
from tests.kit.client.models import MLP, Blocks, Projections
from tests.kit.client.sink import MemorySink
from tests.kit.tiers import rows

pytestmark = COMPILING


def late(model: nn.Module) -> tuple[Step, WatchHandle]:
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(2, 5, 6, requires_grad=True))  # as in `train`: other inputs would be compiled anew
    return compiled, watch(model)


def late_in_regions(model: nn.Module) -> tuple[Step, WatchHandle]:
    for layer in model.layers:
        layer.compile(backend="eager")
    model(torch.randn(2, 5, 6))
    return model, watch(model)


@pytest.mark.parametrize(("way", "missing"), [(late, "5 of the 5"), (late_in_regions, "4 of the 5")])
def test_a_watch_behind_the_first_compiled_step_says_so(
    sink: MemorySink, way: Any, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Regional()
    call, _ = way(model)

    train(call, model, steps=4)

    assert caplog.text.count("are not captured") == 1
    assert f"{missing} watched modules of Regional are not captured" in caplog.text
    assert "torch.compiler.reset()" in caplog.text
    torch.compiler.reset()
    taken(sink)
    train(call, model, steps=1)
    assert sink.names()["output"] == 10


def test_where_operators_have_no_effects_compiled_models_train_and_that_is_said(
    sink: MemorySink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = MLP()
    _, results = reference(sink, model)
    monkeypatch.setattr(operators, "_usable", False)
    watch(model, tensors=LINEAR.tensors)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    assert equal(train(compiled, model), results)

    assert sink.captured == []
    assert "cannot capture inside compiled graphs. Use a newer torch" in caplog.text


def test_errors_in_a_tap_are_counted_and_the_graph_goes_on(
    monkeypatch: pytest.MonkeyPatch, sink: MemorySink
) -> None:
    model = MLP()
    _, results = reference(sink, model)
    watch(model, tensors=LINEAR.tensors)
    failing = {"offer": 0}

    def offer(*_: Any, **__: Any) -> None:
        failing["offer"] += 1
        raise RuntimeError("no")

    monkeypatch.setattr(sink, "offer", offer)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    assert equal(train(compiled, model), results)

    assert failing["offer"] == len(sink.errors) > 0
    sink.errors.clear()


def test_a_compiled_model_is_steered_without_being_compiled_again(sink: MemorySink) -> None:
    model = Blocks()
    watch(model, select="layers.*")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    own = {"layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2"}
    orders = [
        Steer(
            id=1, from_iteration=1, selection=Selection(modules=("*.1.*",), tensors=("input", "grad_output"))
        ),
        Steer(id=2, from_iteration=2, capturing=False),
        Steer(id=3, from_iteration=3),
    ]
    found = []
    for order in [None, *orders]:
        if order is not None:
            sink.steering.receive(order)
        train(compiled, model, steps=1)
        found.append({(c.moment.iteration, c.key.module, c.key.tensor_name) for c in sink.captured})
        sink.captured.clear()

    everything = ("input", "weight", "output", "grad_output")
    assert found[0] == {(0, module, name) for module in own for name in everything}
    assert found[1] == {(1, f"layers.1.{n}", name) for n in (0, 2) for name in ("input", "grad_output")}
    assert found[2] == set()
    assert found[3] == {(3, module, name) for module in own for name in everything}
    assert counter.frame_count == 1


def test_inside_vmap_nothing_is_captured_and_that_is_said(
    sink: MemorySink, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taps, "_notices", RateLimitedLog())
    model = MLP()
    watch(model)
    compiled = torch.compile(lambda x: torch.func.vmap(model)(x), backend="aot_eager", fullgraph=True)

    compiled(torch.randn(3, 2, 6)).sum().backward()

    assert sink.captured == []
    assert "nothing is captured inside vmap" in caplog.text


@pytest.mark.slow
def test_compiled_autograd_calls_the_hooks_of_an_uncompiled_forward(sink: MemorySink) -> None:
    model = MLP()
    expected, results = reference(sink, model)
    watch(model, tensors=LINEAR.tensors)

    with torch._dynamo.compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        assert equal(train(model, model), results)

    same(sink.captured, expected)


def test_a_tensor_parallel_model_gives_its_local_shards(sink: MemorySink, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        model = Projections()
        mesh = init_device_mesh("cpu", (1,))
        parallelize_module(model, mesh, {"inlet": ColwiseParallel(), "q": RowwiseParallel()})
        watch(model)

        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(2, 4)).sum().backward()

        assert sink.names()["grad_output"] == sink.names()["output"] == 4
        assert {type(c.value) for c in sink.captured} == {Tensor}
        inlet = {c.key.tensor_name: c.attributes for c in sink.captured if c.key.module == "inlet"}
        place = {"mesh": ("mesh0",), "mesh0_rank": 0, "mesh0_size": 1, "class": "Linear", "emulation": "none"}
        assert inlet["weight"] == {**place, "mesh0_placement": "S(0)"}
        assert inlet["input"] == {**place, "mesh0_placement": "R"}
        assert inlet["output"] == inlet["grad_output"] == {**place, "mesh0_placement": "S(1)"}
    finally:
        torch.distributed.destroy_process_group()


def test_blocks_that_are_alike_share_a_graph_as_they_do_unwatched(sink: MemorySink) -> None:
    model = nn.Sequential(*(Block() for _ in range(torch._dynamo.config.recompile_limit + 2)))
    expected, results = reference(sink, model, steps=1)
    graphs = []
    for watched in (False, True):
        ours = copy.deepcopy(model)
        if watched:
            watch(ours, tensors=LINEAR.tensors)
        counter = CompileCounterWithBackend("aot_eager")
        for block in ours:
            block.compile(backend=counter, fullgraph=True)
        assert equal(train(ours, ours, steps=1), results)
        graphs.append(counter.frame_count)
        torch.compiler.reset()

    assert graphs[0] == graphs[1]
    same(sink.captured, expected)


@pytest.mark.parametrize("select", rows(["0.*", "1.*", "3.*", "*.down"], ["1.*"]))
def test_blocks_that_are_left_out_do_not_lend_their_graph_to_watched_ones(
    sink: MemorySink, select: str
) -> None:
    model = nn.Sequential(*(Block() for _ in range(4)))
    expected, results = reference(sink, model, select=select)
    ours = copy.deepcopy(model)
    watch(ours, tensors=LINEAR.tensors, select=select)
    for block in ours:
        block.compile(backend="aot_eager", fullgraph=True)

    assert equal(train(ours, ours), results)

    assert expected
    same(sink.captured, expected)


@pytest.mark.slow
def test_where_ddp_splits_the_graph_the_model_trains_and_that_is_said(
    sink: MemorySink, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taps, "_notices", RateLimitedLog())
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        model = nn.parallel.DistributedDataParallel(
            nn.Sequential(*(Block(512) for _ in range(3))), bucket_cap_mb=1
        )
        watch(model, tensors=LINEAR.tensors)

        torch.compile(model, backend="aot_eager")(torch.randn(2, 512)).sum().backward()
        # A DDP model that outlives its group may wait for gloo for ever.
        del model
    finally:
        torch.distributed.destroy_process_group()

    assert sink.captured == []
    assert "DDPOptimizer splits it; set torch._dynamo.config.optimize_ddp = False" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("backend", rows(["aot_eager", "inductor"], ["aot_eager"]))
@pytest.mark.parametrize("way", rows(["config", "region"], ["region"]))
def test_with_a_memory_budget_the_model_trains_and_that_is_said(
    sink: MemorySink,
    way: str,
    backend: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(taps, "_notices", RateLimitedLog())
    monkeypatch.setattr(taps, "_refused", False)

    def results(*, watched: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = Blocks()
        if watched:
            watch(model, tensors=LINEAR.tensors)
        region = partial(getattr(torch.autograd.graph, "region_activation_memory_budget", nullcontext), 0.3)

        def forward(x: Tensor) -> Tensor:
            if way == "config":
                return model(x)
            with region():
                return model(x)

        with torch._functorch.config.patch(activation_memory_budget=0.3 if way == "config" else 1.0):
            found = train(torch.compile(forward, backend=backend, fullgraph=True), model)
        torch.compiler.reset()
        return found

    torch.testing.assert_close(results(watched=True), results(watched=False), rtol=0, atol=0)

    assert sink.captured == []
    assert caplog.text.count("activation_memory_budget is below 1") == 1
    assert "are not captured" not in caplog.text  # which would advise what does not help


@pytest.mark.slow
def test_a_compiled_optimizer_compiles_as_much_as_without(sink: MemorySink) -> None:
    frames = []
    for watched in (False, True):
        model = MLP()
        if watched:
            watch(model, tensors=LINEAR.tensors)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
        step = torch.compile(optimizer.step, backend="aot_eager")
        torch._dynamo.utils.counters.clear()
        for _ in range(4):
            model(torch.randn(2, 6)).sum().backward()
            step()
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
        torch.compiler.reset()

    assert frames[0] == frames[1]
    assert {c.moment.iteration for c in sink.captured} == {0, 1, 2, 3}


@pytest.mark.slow
def test_tensors_without_modes_can_be_handled_inside_compiled_graphs(sink: MemorySink) -> None:
    model = MLP()
    watch(model, tensors=LINEAR.tensors)
    entered = []

    def offer(*_: Any, **__: Any) -> None:
        with without_modes():
            entered.append(True)

    sink.offer = offer  # type: ignore[method-assign]
    torch.compile(model)(torch.randn(2, 6)).sum().backward()

    assert len(entered) == 11
