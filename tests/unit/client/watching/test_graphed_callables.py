"""Modules that are made into CUDA graphs: capd's hooks step aside, and what is not captured from then on is said.

The functions are torch's own, on graphs that compute again, and a stand-in for TransformerEngine's.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capd_client.hooks.base import Hook
from capd_client.process.log import RateLimitedLog
from capd_client.watching import graphed_callables
from capd_client.watching.automatic import give_way, watch_found
from capd_client.watching.watch import watch
from tests.kit.client import fake_graphs
from tests.kit.client.sink import MemorySink
from tests.kit.paths import TE_STAND_IN

LOST = "watched modules are not captured"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.inlet(x))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed_callables, "_notices", RateLimitedLog())
    fake_graphs.install(monkeypatch)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in's functions, gone afterwards."""
    monkeypatch.syspath_prepend(str(TE_STAND_IN))
    import transformer_engine.pytorch.graph as te

    yield te
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def sample(*, grad: bool = True) -> Tensor:
    return torch.ones(2, 4, requires_grad=grad)


def graph(module: nn.Module) -> None:
    torch.cuda.make_graphed_callables(module, (sample(),))


def train(model: nn.Module, steps: int = 2) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), float(step + 1))).square().sum()
        loss.backward()
        optimizer.step()
        results += [loss.detach(), *(p.detach().clone() for p in model.parameters())]
    return results


def captured(sink: MemorySink, *, without: str = "") -> set[tuple[str, str, tuple[int, int, int]]]:
    return {(c.key.module, c.key.tensor_name, c.at) for c in sink.captured if c.key.module != without}


def hooks_of(model: nn.Module) -> list[list[tuple[int, Any]]]:
    return [
        list(hooks.items())
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
    ]


def test_a_part_of_a_watched_model_can_be_graphed_and_trains_the_same(
    sink: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    bare = copy.deepcopy(model)
    graph(bare.block)
    watch(model)
    before = hooks_of(model)
    graph(model.block)

    assert hooks_of(model) == before
    assert sink.captured == []
    assert f"2 {LOST}: Sequential is replayed as a CUDA graph" in caplog.text
    assert "static_tap" in caplog.text
    for ours, theirs in zip(train(model), train(bare), strict=True):
        assert torch.equal(ours, theirs)
    names = ("input", "weight", "output", "grad_output")
    assert captured(sink) == {("inlet", name, (step, 0, 0)) for step in (0, 1) for name in names}
    assert caplog.text.count(LOST) == 1


def test_without_stepping_aside_torch_refuses(sink: MemorySink) -> None:
    model = Net()
    watch(model)
    graphed = torch.cuda.make_graphed_callables.__wrapped__  # type: ignore[attr-defined]

    for module in (model, model.inlet):
        with pytest.raises(AssertionError, match="must not have hooks registered"):
            graphed(module, (sample(),))


def test_what_is_graphed_itself_still_gives_what_goes_in_and_out(
    sink: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    expected = train(copy.deepcopy(model))
    watch(model)
    graph(model.inlet)

    for ours, theirs in zip(train(model), expected, strict=True):
        assert torch.equal(ours, theirs)

    assert {(c.key.module, c.at) for c in sink.captured if c.key.tensor_name == "input"} == {
        (name, (step, 0, 0)) for name in ("inlet", "block.0", "block.2") for step in (0, 1)
    }
    first = next(c for c in sink.captured if c.key.module == "inlet" and c.key.tensor_name == "input")
    assert torch.equal(first.value, torch.ones(2, 4))
    assert LOST not in caplog.text


def test_a_root_that_is_graphed_still_counts_its_micro_batches(
    sink: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    watch(model)
    graph(model)
    for _ in range(3):
        model(sample()).sum().backward()

    assert f"3 {LOST}: Net" in caplog.text
    assert (sink.captured, sink.context.micro_batch) == ([], 2)


def test_hooks_of_the_job_stay_and_are_refused_and_ours_are_back(
    sink: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    watch(model)
    model.inlet.register_forward_pre_hook(lambda *_: None)
    before = hooks_of(model)

    with pytest.raises(AssertionError, match="must not have hooks registered"):
        graph(model.inlet)

    assert hooks_of(model) == before
    assert LOST not in caplog.text
    train(model, steps=1)
    assert {c.key.module for c in sink.captured} == {"inlet", "block.0", "block.2"}


def test_hooks_come_back_where_they_were_among_those_of_the_job(sink: MemorySink) -> None:
    model = Net()
    inner = model.block[0]
    gone = inner.register_forward_hook(lambda *_: None)
    inner.register_forward_hook(lambda *_: None)
    handle = watch(model)
    inner.register_forward_hook(lambda *_: None)
    [before] = [list(inner._forward_hooks)]
    added = []

    class Meddling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            if not added:
                gone.remove()
                added.append(inner.register_forward_hook(lambda *_: None).id)
            return self.model(x)

    graph(Meddling())

    assert list(inner._forward_hooks) == [number for number in before if number != gone.id] + added
    handle.remove()
    assert not any(isinstance(hook, Hook) for hooks in hooks_of(model) for _, hook in hooks)


def test_functions_that_are_graphed_are_warmed_up_uncaptured(sink: MemorySink) -> None:
    model = Net()
    watch(model)

    torch.cuda.make_graphed_callables(lambda x: model(x) * 2, (sample(),))

    assert sink.captured == []
    train(model, steps=1)
    assert {c.at for c in sink.captured} == {(0, 0, 0)}


def test_a_watch_behind_the_graph_says_so(sink: MemorySink, caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    graph(model.block)
    watch(model)
    train(model)

    assert caplog.text.count(LOST) == 1
    assert f"2 {LOST}: Sequential" in caplog.text
    assert {c.key.module for c in sink.captured} == {"inlet"}


def test_a_graph_of_evaluations_takes_nothing_away(
    sink: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    early, late = Net(), Net()
    watch(early)
    for model in (early, late):
        graph(model.block.eval())
    watch(late, name="late")
    for model in (early, late):
        train(model.train(), steps=1)

    assert LOST not in caplog.text
    assert len({c.key.module for c in sink.captured}) == 6


def test_a_model_that_was_found_is_graphed_alike(
    sink: MemorySink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("capd_client.watching.automatic.session", lambda: sink)
    model = Net()

    assert watch_found(model, called=model, name="") == "watched"
    try:
        graph(model.block)
        train(model, steps=1)
    finally:
        give_way()

    assert f"2 {LOST}" in caplog.text
    assert {c.key.module for c in sink.captured} == {"inlet"}


def test_a_model_that_is_found_while_it_is_graphed_trains_and_that_is_said(
    sink: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()

    class Found(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if not watched:
                watched.append(watch(model))
            return super().forward(x)

    watched: list[object] = []
    model.block = Found(*model.block)
    bare = copy.deepcopy(model)
    graph(model.block)
    sink.captured.clear()

    assert f"2 {LOST}: Found" in caplog.text
    for ours, theirs in zip(train(model), train(bare), strict=True):
        assert torch.equal(ours, theirs)
    assert {c.key.module for c in sink.captured} == {"inlet"}


def test_a_job_that_imported_the_function_before_calls_it_alike(
    sink: MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ModuleType("job")
    original = job.make_graphed_callables = torch.cuda.make_graphed_callables  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "job", job)
    model = Net()
    handle = watch(model)

    job.make_graphed_callables(model, (sample(),))
    kept = torch.cuda.make_graphed_callables
    handle.remove()

    assert job.make_graphed_callables is torch.cuda.make_graphed_callables is original
    other = Net()
    assert kept(other, (sample(),)) is other  # without a watch it is torch's own


@pytest.mark.parametrize(("order", "silent"), [(None, 2), ([1, -1], 3)])
def test_transformer_engines_is_met_alike(
    sink: MemorySink, engine: Any, order: Any, silent: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With an order it gives functions, which a pipeline calls in the place of the modules."""
    model = Net()
    refuses = engine.make_graphed_callables
    watch(model)
    with pytest.raises(AssertionError, match="must not have hooks"):
        refuses(modules=(model.inlet,), sample_args=((sample(),),))
    before = hooks_of(model)

    engine.make_graphed_callables(
        modules=(model.inlet, model.block), sample_args=((sample(),), (sample(),)), _order=order
    )

    assert hooks_of(model) == before
    assert f"{silent} {LOST}: Linear, Sequential is replayed" in caplog.text
    assert sink.captured == []


def test_a_watch_behind_transformer_engines_graph_says_so(
    sink: MemorySink, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    engine.make_graphed_callables((model.block,), ((sample(),),))
    watch(model)

    assert f"2 {LOST}: Sequential" in caplog.text
