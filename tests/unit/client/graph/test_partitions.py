"""CUDA graphs that the compiler makes: they are cut at capd's operators, or capd stays out of them and says so.

The decision is Inductor's own, on nodes that are taken for a GPU's. Without a GPU it makes no CUDA graph of them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config, ir, scheduler
from tqdm import tqdm

import capd_client
from capd_client.graph import partitions, taps
from capd_client.process.log import RateLimitedLog
from tests.kit.client.peer import Peer

pytestmark = [  # what torch itself warns of while it compiles, with and without capd
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]

Cuts = dict[str, set[bool]]


def each(*operators: str, cut: bool) -> Cuts:
    return {f"capd::{name}": {cut} for name in operators}


_watching: list[Any] = []  # handles of the watches of a test, which ends them


@pytest.fixture(autouse=True)
def _forget_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # the compiler's progress bars leave a thread behind
    monkeypatch.setattr(taps, "_notices", RateLimitedLog())
    monkeypatch.setattr(taps, "_refused", False)
    torch.compiler.reset()
    with config.patch(custom_should_partition_ops=[], fx_graph_cache=False):
        yield
    while _watching:
        _watching.pop().remove()
    torch.compiler.reset()


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Cuts:
    """By operator of capd's: whether Inductor cuts its graph at the nodes that call it."""
    found: Cuts = defaultdict(set)
    decide = scheduler.Scheduler.should_partition

    def decided(self: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
        called = node.node.op_overload if isinstance(node.node, ir.FallbackKernel) else None
        if called is not None and called.namespace == "capd":
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(node, "is_gpu", lambda: True)
                found[called.name()].add(bool(decide(self, node, *args, **kwargs)))
        return decide(self, node, *args, **kwargs)

    monkeypatch.setattr(scheduler.Scheduler, "should_partition", decided)
    return found


def watched_model() -> Callable[[Tensor], Tensor]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    _watching.append(capd_client.watch(model, steps="all"))
    return lambda x: model(x) + 0.0


def captures(x: Tensor) -> Tensor:
    y = x * 2
    capd_client.capture(y, tensor_name="y")
    return y + 1


def step(call: Callable[[Tensor], Tensor]) -> None:
    """One forward, and its backward on a thread of its own, as that of a GPU has one."""
    loss = call(torch.ones(2, 4, requires_grad=True)).sum()
    if loss.requires_grad:
        own_names = len(config.custom_should_partition_ops)
        backward = threading.Thread(target=lambda: (config.custom_should_partition_ops, loss.backward()))
        backward.start()
        backward.join()
        assert len(config.custom_should_partition_ops) == own_names


def compiled(call: Callable[[Tensor], Tensor], **how: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(call, fullgraph=True, **(how or {"mode": "reduce-overhead"}))


@pytest.mark.parametrize(
    "how",
    [pytest.param({}, marks=pytest.mark.slow), {"options": {"triton.cudagraphs": True}}],
    ids=["mode", "options"],
)
def test_graphs_are_cut_at_the_taps_of_a_watched_model(on: Peer, cuts: Cuts, how: dict[str, Any]) -> None:
    call = compiled(watched_model(), **how)

    step(call)
    with torch.no_grad():
        step(call)

    assert cuts == each("begin", "end", "tap", "gradient", cut=True)
    assert capd_client.flush(10)
    assert {record.key.tensor_name for record in on.records} == {"input", "weight", "output", "grad_output"}


def test_graphs_are_cut_at_captures(on: Peer, cuts: Cuts, monkeypatch: pytest.MonkeyPatch) -> None:
    step(compiled(captures))
    torch.compiler.reset()
    monkeypatch.setattr("capd_client.explicit.in_graph.crowded", lambda: True)
    step(compiled(captures))

    assert cuts == each("capture", "left_out", cut=True)


def test_they_would_not_be_cut_there_by_themselves(
    on: Peer, cuts: Cuts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "_cut_at", lambda name: None)

    step(compiled(watched_model()))
    step(compiled(captures))

    assert cuts == each("begin", "tap", "gradient", "capture", cut=False)


def test_what_the_job_names_stays_named(on: Peer, cuts: Cuts) -> None:
    own, options = ["aten::mm"], ["aten::addmm"]
    with config.patch(custom_should_partition_ops=own):
        step(compiled(captures, options={"triton.cudagraphs": True, "custom_should_partition_ops": options}))
        assert config.custom_should_partition_ops == ["aten::mm"]
        step(compiled(watched_model()))
        assert config.custom_should_partition_ops[0] == "aten::mm"
    assert config.custom_should_partition_ops == []
    assert (own, options) == (["aten::mm"], ["aten::addmm"])
    assert cuts == each("begin", "tap", "gradient", "capture", cut=True)


def test_what_is_cut_gives_what_it_gives_uncompiled(on: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    call, x = watched_model(), torch.ones(2, 4, requires_grad=True)
    names = ("input", "output", "grad_output")  # the weight is captured once for each step
    parts: list[bool] = []

    def run(call: Callable[[Tensor], Tensor]) -> list[Any]:
        gradient = torch.autograd.grad(call(x).square().sum(), x)[0]
        assert capd_client.flush(10)
        data = [np.frombuffer(b"".join(on.data_of(name)), np.float32) for name in names]
        on.records.clear()
        return [gradient, *data]

    decide, divide = scheduler.Scheduler.should_partition, scheduler.Scheduler.graph_partition

    def as_on_a_gpu(self: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(node, "is_gpu", lambda: True, raising=False)
            return decide(self, node, *args, **kwargs)

    def divided(self: Any) -> Any:
        made = divide(self)
        parts.extend(signature.skip_cudagraph for signature in made[1])
        return made

    expected = run(call)
    assert all(len(values) for values in expected)
    monkeypatch.setattr(scheduler.Scheduler, "should_partition", as_on_a_gpu)
    monkeypatch.setattr(scheduler.Scheduler, "graph_partition", divided)
    found = run(compiled(call))

    assert parts.count(False) >= 3  # graphs of the forward in front, between and behind the products
    assert parts.count(True) >= 3
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, strict=True)


@pytest.mark.slow
def test_without_cuda_graphs_the_compiler_is_told_nothing(on: Peer) -> None:
    step(compiled(watched_model(), backend="inductor"))

    assert config.custom_should_partition_ops == []
    assert capd_client.flush(10)
    assert on.records


@contextmanager
def forget_setting() -> Iterator[None]:
    """As in a torch that has no such setting."""
    known = SimpleNamespace(triton=config.triton, graph_partition=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(partitions, "_config", lambda: known)
        yield


def cut_nowhere() -> AbstractContextManager[None]:
    return config.patch(graph_partition=False)


@pytest.mark.parametrize(
    ("otherwise", "reason"),
    [
        pytest.param(forget_setting, "cannot keep operators out of its CUDA graphs", marks=pytest.mark.slow),
        (cut_nowhere, "set torch._inductor.config.graph_partition = True"),
    ],
)
def test_where_they_cannot_be_cut_the_job_trains_and_that_is_said(
    on: Peer,
    cuts: Cuts,
    otherwise: Callable[[], AbstractContextManager[None]],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    call, x = watched_model(), torch.ones(2, 4, requires_grad=True)
    expected = torch.autograd.grad(call(x).sum(), x)[0]
    assert capd_client.flush(10)
    on.records.clear()
    with otherwise():
        found = torch.autograd.grad(compiled(call)(x).sum(), x)[0]
        step(compiled(captures))

    assert torch.equal(found, expected)
    assert capd_client.flush(10)
    assert (on.records, cuts) == ([], {})
    assert capd_client.counters()["dropped"] == {"unsupported": 1}
    assert caplog.text.count(reason) == 2
