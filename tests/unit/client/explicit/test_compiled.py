"""`capture()` inside compiled functions: taken at every call without a graph break, named and numbered as given."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import capd_client
from capd_client.graph import operators
from capd_client.protocol.key import Key
from tests.kit.client.compiled_models import COMPILING
from tests.kit.client.peer import Peer
from tests.kit.tiers import rows

pytestmark = COMPILING


def values(peer: Peer, tensor_name: str) -> list[list[float]]:
    return [np.frombuffer(data, np.float32).tolist() for data in peer.data_of(tensor_name)]


@pytest.mark.parametrize("backend", rows(["eager", "aot_eager"], ["aot_eager"]))
def test_every_call_is_captured_and_the_graph_stays_whole(on: Peer, backend: str) -> None:
    counter = CompileCounterWithBackend(backend)

    @torch.compile(backend=counter, fullgraph=True)
    def double(x: Tensor) -> Tensor:
        y = x * 2
        capd_client.capture(y, tensor_name="y", layer_type="attention", metadata={"is": "constant"})
        return (y + 1).sum()

    for value in (1.0, 2.0, 3.0):
        double(torch.full((2,), value, requires_grad=True)).backward()

    assert capd_client.flush(10)
    assert values(on, "y") == [[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]]
    assert counter.frame_count == 1
    record = on.records[0]
    assert record.key == Key(quant_type="fp32", rank=0, tensor_name="y", layer_type="attention")
    assert json.loads(record.descriptor.metadata) == {"is": "constant"}
    assert (record.descriptor.requires_grad, record.descriptor.is_leaf) == (True, False)
    assert [record.descriptor.moment.call for record in on.records] == [0, 1, 2]


def test_a_compiled_call_takes_every_argument_of_capture(on: Peer) -> None:
    every: dict[str, Any] = {
        "tensor_name": "x", "layer_type": "linear", "component": "up", "operation": "backward", "phase": "post",
        "layer": 3, "module": "layers.3", "stack": "encoder", "quant_type": "mine", "metadata": {"is": "constant"},
        "slice": "first:1", "iteration": 4, "micro_batch": 5, "sample_idx": 6, "batch_idx": 7, "sequence_idx": 8,
        "immutable": True, "attributes": {"tp_placement": "R", "tp_rank": 0, "tp_size": 2},
    }  # fmt: skip
    assert {"tensor", *every} == inspect.signature(capd_client.capture).parameters.keys()

    def double(x: Tensor) -> Tensor:
        capd_client.capture(x, **every)
        return x * 2

    for run in (double, torch.compile(double, backend="aot_eager", fullgraph=True)):
        run(torch.full((2,), 3.0))

    assert capd_client.flush(10)
    assert values(on, "x") == [[3.0], [3.0]]
    eager, compiled = on.records
    assert eager.key == compiled.key
    assert eager.descriptor.metadata == compiled.descriptor.metadata
    assert eager.attributes == compiled.attributes
    assert compiled.attributes["tp_size"] == 2
    moments = [msgspec.structs.replace(one.descriptor.moment, call=0, time_ns=0) for one in (eager, compiled)]
    assert moments[0] == moments[1]
    assert moments[0].sequence_idx == 8


def test_a_compiled_call_with_a_wrong_argument_raises_as_an_eager_one(on: Peer) -> None:
    @torch.compile(backend="aot_eager")
    def double(x: Tensor) -> Tensor:
        capd_client.capture(x, tensor_name="x", layr=3)  # type: ignore[call-arg]
        return x * 2

    with pytest.raises(TypeError, match="layr"):
        double(torch.ones(2))


def test_numbers_may_change_from_call_to_call(on: Peer) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def block(x: Tensor, layer: int, step: int) -> Tensor:
        capd_client.capture(x, tensor_name="x", layer=layer, iteration=step)
        return x + 1

    for number in range(6):
        block(torch.ones(2), number, 10 + number)

    assert capd_client.flush(10)
    assert [record.key.layer for record in on.records] == list(range(6))
    assert [record.descriptor.moment.iteration for record in on.records] == list(range(10, 16))
    assert counter.frame_count == 2  # the compiler's own way with numbers: once for the first, once for all


class Numbered(nn.Module):
    """A block that has a number and a name, and uses both beside the capture if `uses_them`."""

    def __init__(self, number: int, *, captures: str, uses_them: bool = False) -> None:
        super().__init__()
        self.number, self.name = number, f"blocks.{number}"
        self.weight = nn.Parameter(torch.ones(2))
        self._by_number = {n: 2.0 * n for n in range(100)}
        self._captures, self._uses_them = captures, uses_them

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        if self._captures == "number":
            capd_client.capture(y, tensor_name="y", layer=self.number)
        elif self._captures == "name":
            capd_client.capture(y, tensor_name="y", module=self.name)
        if self._uses_them:
            y = y + self._by_number[self.number] + len(f"{self.number}")
        if self._captures == "number":
            capd_client.capture(y, tensor_name="z", layer=self.number, sample_idx=self.number)
        return y


def run(blocks: list[Numbered], counter: CompileCounterWithBackend, *, fullgraph: bool) -> Tensor:
    """Three steps and a pass without gradients through blocks that are compiled one by one."""
    for block in blocks:
        block.compile(backend=counter, fullgraph=fullgraph)
    for step in range(4):
        with torch.set_grad_enabled(step < 3):
            x = torch.ones(2, requires_grad=step < 3)
            for block in blocks:
                x = block(x)
        if step < 3:
            x.sum().backward()
    return torch.stack([x, *(b.weight.grad for b in blocks if b.weight.grad is not None)])


@torch._dynamo.config.patch(recompile_limit=16)  # the job's own six graphs are below half of it
def test_a_number_that_is_captured_stays_a_constant_where_the_job_uses_it(on: Peer) -> None:
    results, frames = [], []
    for captures in ("nothing", "number"):
        counter = CompileCounterWithBackend("aot_eager")
        blocks = [Numbered(n, captures=captures, uses_them=True) for n in range(3)]
        results.append(run(blocks, counter, fullgraph=True))
        frames.append(counter.frame_count)
        torch.compiler.reset()

    assert torch.equal(*results)
    assert frames[0] == frames[1]
    assert capd_client.flush(10)
    assert [record.key.layer for record in on.records] == [n for n in range(3) for _ in "yz"] * 4


@pytest.mark.parametrize("fullgraph", rows([False, True], [True]))
@pytest.mark.parametrize("captures", ["number", "name"])
def test_blocks_captured_by_names_of_their_own_never_exceed_the_compilers_limit(
    on: Peer, captures: str, fullgraph: bool, caplog: pytest.LogCaptureFixture
) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    blocks = [Numbered(n, captures=captures) for n in range(torch._dynamo.config.recompile_limit + 4)]
    bare = [Numbered(n, captures="nothing") for n in range(len(blocks))]

    assert torch.equal(run(blocks, counter, fullgraph=fullgraph), run(bare, counter, fullgraph=fullgraph))

    assert capd_client.flush(10)
    counters, calls = capd_client.counters(), len(blocks) * (2 if captures == "number" else 1)
    assert counters["offered"] == 4 * calls
    assert counters["dropped"] == {"unsupported": 4 * calls - len(on.records)}
    names = [block.name if captures == "name" else block.number for block in blocks]
    taken = [r.key.module if captures == "name" else r.key.layer for r in on.records]
    assert set(taken) == set(names[: len(set(taken))])
    assert len(set(taken)) == torch._dynamo.config.recompile_limit // 2
    assert caplog.text.count("compiled too often") == 1
    assert "hit config.recompile_limit" not in caplog.text  # the compiler's own words for giving up


@pytest.mark.parametrize(
    ("setting", "value", "frames"),
    rows(
        [("recompile_limit", 48, 24), ("allow_unspec_int_on_nn_module", True, 3)],
        [("allow_unspec_int_on_nn_module", True, 3)],
    ),
    ids=["a higher limit", "numbers as inputs"],
)
def test_what_the_warning_names_has_every_block_captured(
    on: Peer, setting: str, value: Any, frames: int
) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    blocks = [Numbered(n, captures="number") for n in range(12)]

    with torch._dynamo.config.patch(setting, value):
        run(blocks, counter, fullgraph=True)

    assert capd_client.flush(10)
    for name in ("y", "z"):
        found = [record.key.layer for record in on.records if record.key.tensor_name == name]
        assert found == list(range(12)) * 4
    assert capd_client.counters()["dropped"] == {}
    assert counter.frame_count == frames


def selective() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)


KINDS = {
    "reentrant": {"use_reentrant": True},
    "not": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": selective},
}


@pytest.mark.parametrize("compiled", rows(["not", "whole", "part"], ["not", "whole"]))
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpointed_part_is_captured_once(on: Peer, kind: str, compiled: str) -> None:
    """Also where the session begins in it, with the first capture of the process."""
    compile_ = torch.compile(backend="aot_eager", fullgraph=True)

    def body(x: Tensor) -> Tensor:
        y = x.sin()
        capd_client.capture(y, tensor_name="y")
        return y.cos()

    part = compile_(body) if compiled == "part" else body

    def forward(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(part, x, **KINDS[kind])
        result.register_hook(lambda gradient: capd_client.capture(gradient, tensor_name="dy"))
        return result.sum()

    def graph(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(part, x, **KINDS[kind])
        return result.sum()

    for call in (compile_(graph) if compiled == "whole" else forward,) * 2:
        call(torch.ones(2, requires_grad=True)).backward()

    assert capd_client.flush(10)
    assert len(on.data_of("y")) == 2
    assert len(on.data_of("dy")) == (0 if compiled == "whole" else 2)


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", rows([True, False], [True]))
def test_segments_within_segments_are_captured_once_from_the_first_capture_on(
    on: Peer, outer: bool, inner: bool
) -> None:
    def body(x: Tensor) -> Tensor:
        capd_client.capture(x, tensor_name="x")
        return x.sin()

    def both(x: Tensor) -> Tensor:
        x = checkpoint(body, x, use_reentrant=inner)
        return checkpoint(body, x.cos(), use_reentrant=inner)

    for _ in range(2):
        checkpoint(both, torch.ones(2, requires_grad=True), use_reentrant=outer).sum().backward()

    assert capd_client.flush(10)
    assert [record.descriptor.moment.call for record in on.records] == [0, 1, 2, 3]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.fault)])
@pytest.mark.parametrize("way", ["config", "region"])
def test_with_a_memory_budget_captures_are_counted_once_for_each_graph(
    on: Peer, way: str, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    region = getattr(torch.autograd.graph, "region_activation_memory_budget", None)
    if way == "region" and region is None:
        pytest.skip("this torch has no budgets of regions")

    def body(x: Tensor) -> Tensor:
        y = x.sin().cos()
        capd_client.capture(y, tensor_name="y")
        return y.exp()

    def in_region(x: Tensor) -> Tensor:
        with region(0.3):
            return body(x)

    with torch._functorch.config.patch(activation_memory_budget=0.3 if way == "config" else 1.0):
        compiled = torch.compile(body if way == "config" else in_region, backend=backend, fullgraph=True)
        for _ in range(2):
            x = torch.ones(2, requires_grad=True)
            compiled(x).sum().backward()

    assert x.grad is not None
    assert capd_client.counters()["dropped"] == {"unsupported": 1}
    assert "activation_memory_budget is below 1" in caplog.text


def metadata_of_a_tensor(x: Tensor) -> None:
    capd_client.capture(x, tensor_name="x", metadata={"first": float(x[0].item())})


def test_what_the_compiler_cannot_know_breaks_the_graph_and_is_captured(on: Peer) -> None:
    @torch.compile(backend="eager")
    def forward(x: Tensor) -> Tensor:
        metadata_of_a_tensor(x)
        return x + 1

    forward(torch.ones(2))

    assert capd_client.flush(10)
    assert json.loads(on.records[0].descriptor.metadata) == {"first": 1.0}


def test_arguments_that_are_none_break_no_graph(on: Peer) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def forward(x: Tensor) -> Tensor:
        capd_client.capture(x, tensor_name="x", attributes=None, metadata=None)
        return x + 1

    assert torch.equal(forward(torch.ones(2)), torch.full((2,), 2.0))
    assert capd_client.flush(10)
    assert len(on.records) == 1


MISUSES: list[Callable[[Any], None]] = [
    lambda x: capd_client.capture([x], tensor_name="x"),  # type: ignore[arg-type]
    lambda x: capd_client.capture(x, tensor_name=3),  # type: ignore[arg-type]
    lambda x: capd_client.capture(x, tensor_name="x", layer="three"),  # type: ignore[arg-type]
    lambda x: capd_client.capture(x, tensor_name="x", layer=-3),
    lambda x: capd_client.capture(x, tensor_name="x", metadata=[1]),  # type: ignore[arg-type]
    lambda x: capd_client.capture(x, tensor_name="x", metadata={"a": 1j}),
    lambda x: capd_client.capture(x, tensor_name="x", attributes=[1]),  # type: ignore[arg-type]
    lambda x: capd_client.capture(x, tensor_name="x", attributes={"a": 1j}),
]


@pytest.mark.parametrize("misuse", MISUSES)
def test_wrong_use_is_counted_and_never_raised(on: Peer, misuse: Callable[[Any], None]) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def forward(x: Tensor) -> Tensor:
        misuse(x)
        return x + 1

    assert torch.equal(forward(torch.ones(2)), torch.full((2,), 2.0))

    counters = capd_client.counters()
    assert counters["dropped"].get("invalid_key", 0) >= 1
    assert counters["committed"] == 0


def test_off_leaves_nothing_in_the_graph(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("CAPD_ENDPOINT", "off")
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def forward(x: Tensor) -> Tensor:
        capd_client.capture(x, tensor_name="x")
        return x + 1

    forward(torch.ones(2))

    assert [node.op for node in graphs[0].graph.nodes] == ["placeholder", "call_function", "output"]


def test_where_operators_have_no_effects_the_graph_breaks_and_the_call_is_made(
    on: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "_usable", False)

    @torch.compile(backend="eager")
    def forward(x: Tensor) -> Tensor:
        capd_client.capture(x, tensor_name="x")
        return x + 1

    forward(torch.ones(2))

    assert capd_client.flush(10)
    assert len(on.records) == 1


def test_after_close_compiled_functions_go_on(on: Peer) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def forward(x: Tensor) -> Tensor:
        capd_client.capture(x, tensor_name="x")
        return x + 1

    forward(torch.ones(2))
    capd_client.close()

    assert torch.equal(forward(torch.ones(2)), torch.full((2,), 2.0))
    assert len(on.records) == 1
