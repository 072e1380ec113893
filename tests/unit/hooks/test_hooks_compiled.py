"""Inside compiled graphs the taps take what they take without, once per call, and compile nothing twice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_sink import Captured, MemorySink
from small_models import MLP, Blocks, Projections, Repeated, non_reentrant, reentrant, selective
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tqdm import tqdm

from capd_client import graph_ops, graph_taps, late_watch, watch
from capd_client.context import Context
from capd_client.hooks import WatchHandle
from capd_client.notices import Notices
from capd_client.select import TENSORS, Selection
from capd_client.tensors import without_modes
from capd_client.tool_messages import Steer

Step = Callable[[Tensor], Tensor]

pytestmark = [  # what torch itself warns of while it compiles, with and without capd
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(width, 8 * width // 6)
        self.down = nn.Linear(8 * width // 6, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu_(self.up(x)))


class Regional(nn.Module):
    """Blocks that are compiled one by one, between parts that are not; each in its own checkpoint, all in one."""

    def __init__(self, wrap: Callable[..., Any] | None = None, *, nested: bool = False) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self._wrap = wrap or (lambda function, x: function(x))
        self._nested = nested

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        return self._wrap(self._body, x) if self._nested else self._body(x)

    def _body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self._wrap(layer, x)
        return x


@pytest.fixture(autouse=True)
def _forget_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # the compiler's progress bars leave a thread behind
    monkeypatch.setattr(late_watch, "_notices", Notices())
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def taken(sink: MemorySink) -> list[Captured]:
    """What was captured; the sink starts anew, at the first step."""
    captured, sink.captured = sink.captured, []
    sink.context = Context(environ={})
    return captured


def same(ours: list[Captured], theirs: list[Captured], *, exact: bool = True) -> None:
    """Both captured the same tensors at the same moments, each once."""
    first, second = (
        {(c.key, c.at, tuple(c.attributes.items())): c for c in captured} for captured in (ours, theirs)
    )
    assert len(first) == len(ours)
    assert len(second) == len(theirs)
    assert first.keys() == second.keys()
    for at, capture in first.items():
        if exact:
            assert torch.equal(capture.value, second[at].value), at
        else:
            torch.testing.assert_close(capture.value, second[at].value)


def train(call: Step, model: nn.Module, *, steps: int = 3) -> list[Tensor]:
    """Steps of two micro-batches, in turn one after the other and both forwards first; losses and gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(3)
    width = next(m for m in model.modules() if isinstance(m, nn.Linear)).in_features
    results: list[Tensor] = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs = [torch.randn(2, 5, width, generator=generator, requires_grad=True) for _ in range(2)]
        if step % 2:
            losses = [call(x).square().sum() for x in inputs]
            for loss in losses:
                loss.backward()
        else:
            losses = []
            for x in inputs:
                losses.append(call(x).square().sum())
                losses[-1].backward()
        results += [loss.detach() for loss in losses]
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return results


def reference(
    sink: MemorySink, model: nn.Module, *, select: str | None = None, **how: Any
) -> tuple[list[Captured], list[Tensor]]:
    """What an uncompiled copy of `model` captures, and what it computes."""
    model = copy.deepcopy(model)
    handle = watch(model, tensors=TENSORS, select=select)
    results = train(model, model, **how)
    handle.remove()
    return taken(sink), results


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs)) and len(ours) == len(theirs)


MODELS = {
    "mlp": partial(MLP, dropout=0.3),
    "shared-input": Projections,
    "calls": Repeated,
    "reentrant": partial(Blocks, reentrant),
    "non-reentrant": partial(Blocks, non_reentrant),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_gives_what_it_gives_uncompiled(sink: MemorySink, backend: str, name: str) -> None:
    model = MODELS[name]()
    torch.manual_seed(5)
    expected, results = reference(sink, model)
    watch(model, tensors=TENSORS)
    counter = CompileCounterWithBackend(backend)

    torch.manual_seed(5)
    assert equal(train(torch.compile(model, backend=counter, fullgraph=True), model), results)

    same(sink.captured, expected)
    assert counter.frame_count == 1


def test_the_default_backend_too(sink: MemorySink) -> None:
    model = Blocks(non_reentrant)
    bare = copy.deepcopy(model)
    expected, _ = reference(sink, model)
    results = train(torch.compile(bare, fullgraph=True), bare)
    torch.compiler.reset()
    watch(model, tensors=TENSORS)

    torch.testing.assert_close(train(torch.compile(model, fullgraph=True), model), results)

    same(sink.captured, expected, exact=False)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("wrap", [None, reentrant, non_reentrant, selective])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_blocks_compiled_one_by_one_give_the_same(
    sink: MemorySink, backend: str, wrap: Any, nested: bool
) -> None:
    model = Regional(wrap, nested=nested)
    expected, results = reference(sink, model)
    watch(model, tensors=TENSORS)
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
    [
        compiled_whole,
        compiled_before,
        compiled_then_watched_through_the_wrapper,
        compiled_in_place,
        inside_a_compiled_function,
        with_a_graph_break,
    ],
)
def test_however_it_is_compiled(
    sink: MemorySink, way: Callable[..., Step], caplog: pytest.LogCaptureFixture
) -> None:
    model = MLP()
    expected, results = reference(sink, model)

    call = way(model, partial(watch, tensors=TENSORS))

    assert equal(train(call, model), results)
    same(sink.captured, expected)
    assert "give nothing" not in caplog.text


def test_a_step_that_is_not_captured_compiles_nothing_and_captures_nothing(sink: MemorySink) -> None:
    model = MLP()
    watch(model, steps="1,3")
    counter = CompileCounterWithBackend("aot_eager")

    train(torch.compile(model, backend=counter, fullgraph=True), model, steps=5)

    assert counter.frame_count == 1
    assert {c.moment.iteration for c in sink.captured} == {1, 3}


def test_a_removed_watch_leaves_inert_graphs_and_compiles_once_more_at_most(sink: MemorySink) -> None:
    model = MLP()
    handle = watch(model, tensors=TENSORS)
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


def test_an_eval_pass_and_one_without_gradients(sink: MemorySink) -> None:
    model = MLP()
    watch(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    model.eval()
    compiled(torch.randn(2, 6))
    assert sink.captured == []
    model.train()
    with torch.no_grad():
        compiled(torch.randn(2, 6))
    with torch.inference_mode():
        compiled(torch.randn(2, 6))

    assert sink.names() == {"input": 4, "weight": 2, "output": 4}
    assert [c.moment.micro_batch for c in sink.of("fc1", "output")] == [0, 1]


@pytest.mark.parametrize("inside", [False, True])
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
    assert sink.of("fc1", "input")[0].attributes == {"cast_from": "float32"}
    assert sink.one("fc2", "grad_output").dtype == torch.bfloat16


def test_changing_shapes_are_captured_as_they_are(sink: MemorySink) -> None:
    model = MLP()
    watch(model, steps="all")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)

    for rows in (2, 3, 5, 7):
        compiled(torch.randn(rows, 4, 6)).sum().backward()

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

    assert caplog.text.count("give nothing") == 1
    assert f"{missing} watched modules of Regional give nothing" in caplog.text
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
    monkeypatch.setattr(graph_ops, "_usable", False)
    watch(model, tensors=TENSORS)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    assert equal(train(compiled, model), results)

    assert sink.captured == []
    assert "can capture nothing; use a newer one" in caplog.text


def test_errors_in_a_tap_are_counted_and_the_graph_goes_on(
    monkeypatch: pytest.MonkeyPatch, sink: MemorySink
) -> None:
    model = MLP()
    _, results = reference(sink, model)
    watch(model, tensors=TENSORS)
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
    monkeypatch.setattr(graph_taps, "_notices", Notices())
    model = MLP()
    watch(model)
    compiled = torch.compile(lambda x: torch.func.vmap(model)(x), backend="aot_eager", fullgraph=True)

    compiled(torch.randn(3, 2, 6)).sum().backward()

    assert sink.captured == []
    assert "inside vmap nothing is captured" in caplog.text


def test_compiled_autograd_calls_the_hooks_of_an_uncompiled_forward(sink: MemorySink) -> None:
    model = MLP()
    expected, results = reference(sink, model)
    watch(model, tensors=TENSORS)

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
    finally:
        torch.distributed.destroy_process_group()


def test_blocks_that_are_alike_share_a_graph_as_they_do_unwatched(sink: MemorySink) -> None:
    model = nn.Sequential(*(Block() for _ in range(torch._dynamo.config.recompile_limit + 2)))
    expected, results = reference(sink, model, steps=1)
    graphs = []
    for watched in (False, True):
        ours = copy.deepcopy(model)
        if watched:
            watch(ours, tensors=TENSORS)
        counter = CompileCounterWithBackend("aot_eager")
        for block in ours:
            block.compile(backend=counter, fullgraph=True)
        assert equal(train(ours, ours, steps=1), results)
        graphs.append(counter.frame_count)
        torch.compiler.reset()

    assert graphs[0] == graphs[1]
    same(sink.captured, expected)


@pytest.mark.parametrize("select", ["0.*", "1.*", "3.*", "*.down"])
def test_blocks_that_are_left_out_do_not_lend_their_graph_to_watched_ones(
    sink: MemorySink, select: str
) -> None:
    model = nn.Sequential(*(Block() for _ in range(4)))
    expected, results = reference(sink, model, select=select)
    ours = copy.deepcopy(model)
    watch(ours, tensors=TENSORS, select=select)
    for block in ours:
        block.compile(backend="aot_eager", fullgraph=True)

    assert equal(train(ours, ours), results)

    assert expected
    same(sink.captured, expected)


def test_where_ddp_splits_the_graph_the_model_trains_and_that_is_said(
    sink: MemorySink, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_taps, "_notices", Notices())
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        model = nn.parallel.DistributedDataParallel(
            nn.Sequential(*(Block(512) for _ in range(3))), bucket_cap_mb=1
        )
        watch(model, tensors=TENSORS)

        torch.compile(model, backend="aot_eager")(torch.randn(2, 512)).sum().backward()
    finally:
        torch.distributed.destroy_process_group()

    assert sink.captured == []
    assert "DDPOptimizer splits it; set torch._dynamo.config.optimize_ddp = False" in caplog.text


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("way", ["config", "region"])
def test_with_a_memory_budget_the_model_trains_and_that_is_said(
    sink: MemorySink,
    way: str,
    backend: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_taps, "_notices", Notices())
    monkeypatch.setattr(graph_taps, "_refused", False)

    def results(*, watched: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = Blocks()
        if watched:
            watch(model, tensors=TENSORS)
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
    assert "give nothing" not in caplog.text  # which would advise what does not help


def test_a_compiled_optimizer_compiles_as_much_as_without(sink: MemorySink) -> None:
    frames = []
    for watched in (False, True):
        model = MLP()
        if watched:
            watch(model, tensors=TENSORS)
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


def test_tensors_without_modes_can_be_handled_inside_compiled_graphs(sink: MemorySink) -> None:
    model = MLP()
    watch(model, tensors=TENSORS)
    entered = []

    def offer(*_: Any, **__: Any) -> None:
        with without_modes():
            entered.append(True)

    sink.offer = offer  # type: ignore[method-assign]
    torch.compile(model)(torch.randn(2, 6)).sum().backward()

    assert len(entered) == 11
