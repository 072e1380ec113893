"""TransformerEngine, on a stand-in for its GPU modules: what hooks see, and what its own inspection hands on.

The inspection is the real nvdlfw-inspect, which loads capd's feature as a job would have it do.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import capd_client
from capd_client.config.settings import ClientConfig
from capd_client.integrations import te_inspection
from capd_client.watching.watch import watch
from tests.kit.client.sink import Captured, MemorySink
from tests.kit.paths import TE_STAND_IN

CONFIG = """
capture:
  enabled: True
  layers:
    layer_name_regex_pattern: .*
  transformer_engine:
    CapdCapture:
      enabled: True
      tensors: [activation, weight, output, gradient, dgrad, wgrad]
"""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, sink: MemorySink) -> Iterator[Any]:
    """The stand-in's modules, gone afterwards."""
    monkeypatch.syspath_prepend(str(TE_STAND_IN))
    monkeypatch.setattr(te_inspection, "session", lambda: sink)
    monkeypatch.setattr(te_inspection, "_begun", False)
    monkeypatch.setattr(te_inspection, "_inspection", None)
    import transformer_engine.pytorch as te

    yield te
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


@pytest.fixture
def inspection(engine: Any, tmp_path: Path) -> Iterator[Any]:
    """The inspection at work, with capd's feature."""
    import nvdlfw_inspect.api as debug_api
    from nvdlfw_inspect.registry import Registry

    (tmp_path / "capture.yaml").write_text(CONFIG)
    api = str(TE_STAND_IN / "transformer_engine/debug/features")
    debug_api.initialize(
        config_file=str(tmp_path / "capture.yaml"),
        feature_dirs=[api, capd_client.te_features()],
        log_dir=str(tmp_path),
    )
    yield debug_api
    debug_api.end_debug()
    Registry.reset()


class Layer(nn.Module):
    def __init__(self, te: Any, number: int) -> None:
        super().__init__()
        self.qkv = te.LayerNormLinear(8, 24, name=f"layers.{number}.qkv")
        self.core = te.DotProductAttention()
        self.proj = te.Linear(8, 8, name=f"layers.{number}.proj")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)) for t in self.qkv(x).chunk(3, dim=-1))
        return x + self.proj(self.core(q, k, v, attention_mask=torch.ones(1, 1, 3, 3)))


class Model(nn.Module):
    def __init__(self, te: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(te, number) for number in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def train(model: nn.Module, order: str = "FBFB", steps: int = 2, debug_api: Any = None) -> list[float]:
    """Each F is the forward of a micro-batch, each B the backward of the oldest one that waits for it."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses: list[float] = []
    for _ in range(steps):
        waiting: list[Tensor] = []
        for letter in order:
            if letter == "F":
                waiting.append(model(torch.randn(2, 3, 8)))
                losses.append(waiting[-1].item())
            else:
                waiting.pop(0).backward()
        optimizer.step()
        optimizer.zero_grad()
        if debug_api is not None:
            debug_api.step()
    return losses


def by_call(captured: list[Captured]) -> dict[tuple[Any, ...], Captured]:
    found = {(c.key.module, c.key.tensor_name, *c.at): c for c in captured}
    assert len(found) == len(captured)
    return found


def test_modules_are_captured_as_hooks_see_them(engine: Any, sink: MemorySink) -> None:
    torch.manual_seed(0)
    model = Model(engine)
    watch(model, steps="0")
    train(model)
    found = by_call(sink.captured)
    linear = {"input", "output", "grad_output"}
    for number in range(2):
        for micro_batch in range(2):
            of = {n for m, n, *at in found if (m, at) == (f"layers.{number}.proj", [0, micro_batch, 0])}
            assert of == (linear | {"weight"} if micro_batch == 0 else linear)
            of = {n for m, n, *at in found if (m, at) == (f"layers.{number}.core", [0, micro_batch, 0])}
            assert of == {"query", "key", "value", "output", "grad_output"}
    core = found["layers.0.core", "query", 0, 0, 0]
    assert json.loads(core.metadata) == {"attention_mask_shape": [1, 1, 3, 3], "attn_mask_type": "causal"}
    assert core.attributes["layout"] == "bshd"
    proj = found["layers.1.proj", "input", 0, 0, 0]
    assert json.loads(proj.metadata) == {
        "sequence_parallel": False, "use_bias": False, "wgrad_compute": True, "tp_group_size": 1
    }  # fmt: skip
    weight, output = found["layers.1.proj", "weight", 0, 0, 0], found["layers.1.proj", "output", 0, 0, 0]
    assert torch.equal(proj.value @ weight.value.T, output.value)


def test_a_fused_gradient_split_weights_and_groups_are_known(engine: Any, sink: MemorySink) -> None:
    split = engine.Linear(8, 8)
    split.q_weight = split.weight
    del split.weight
    split.forward = lambda inp: inp @ split.q_weight.T
    model = nn.ModuleDict(
        {"fused": engine.Linear(8, 8, fuse=True), "split": split, "grouped": engine.GroupedLinear(8, 8),
         "mlp": engine.LayerNormMLP(8)}
    )  # fmt: skip
    watch(model, tensors=["input", "weight", "output", "grad_output", "grad_weight"], steps="all")
    x = torch.randn(4, 8)
    for name, module in model.items():
        (module(x, [1, 0, 3]) if name == "grouped" else module(x)).sum().backward()
    names = Counter((c.key.module, c.key.tensor_name) for c in sink.captured)
    assert set(names.values()) == {1}
    of = {name: {n for m, n in names if m == name} for name in model}
    assert of["fused"] == {"input", "weight", "output", "grad_output"}
    assert of["split"] == of["mlp"] == {"input", "output", "grad_output"}
    assert of["grouped"] == {"input", "output", "grad_output"}
    assert {c.metadata for c in sink.captured if c.key.module == "grouped"} == {'{"m_splits":[1,0,3]}'}


@pytest.mark.parametrize("order", ["FBFB", "FFBB", "FFBFBB"])
def test_the_inspection_gives_the_operands_under_their_own_micro_batch(
    inspection: Any, engine: Any, sink: MemorySink, order: str
) -> None:
    torch.manual_seed(0)
    model = Model(engine)
    watch(model, steps="all")  # attention, and the micro-batches
    losses = train(model, order, debug_api=inspection)
    parts = Counter("." in c.key.tensor_name for c in sink.captured)
    linears = by_call(
        [c for c in sink.captured if c.key.component == "linear" and "." not in c.key.tensor_name]
    )
    assert parts[True] == 4 * 2 * (order.count("F") * 2 * 2 + 2)  # payload and scale of X and dY, and of W
    micro_batches = order.count("F")
    modules = [f"layers.{n}.{m}" for n in range(2) for m in ("qkv", "proj")]
    for module in modules:
        for step in range(2):
            for micro_batch in range(micro_batches):
                at = (step, micro_batch, 0)
                x, y, dy, dx, dw = (
                    linears[module, name, *at].value
                    for name in ("input", "output", "grad_output", "grad_input", "grad_weight")
                )
                w = linears[module, "weight", step, 0, 0].value
                assert torch.equal(x @ w.T, y)
                assert torch.equal(dy @ w, dx)
                assert torch.equal(dy.flatten(0, -2).T @ x.flatten(0, -2), dw)
    assert len(linears) == len(modules) * 2 * (micro_batches * 5 + 1)
    inspection.end_debug()
    torch.manual_seed(0)
    assert train(Model(engine), order) == losses


def test_the_inspection_gives_what_was_cast_bit_for_bit(
    inspection: Any, engine: Any, sink: MemorySink
) -> None:
    model = engine.Linear(8, 8, name="layers.3.fc")
    watch(nn.Sequential(model, engine.DotProductAttention()), steps="all", select="1")
    x = torch.randn(2, 8, requires_grad=True)
    model(x).backward(torch.ones(2, 8))
    found = {c.key.tensor_name: c for c in sink.captured}
    of = {"input": (x, engine.MXFP8Tensor), "weight": (model.weight, engine.Float8Tensor)}
    names = {"rowwise_data": "_rowwise_data", "rowwise_scale_inv": "_rowwise_scale_inv"}, {
        "data": "_data", "fp8_scale_inv": "_scale_inv"
    }  # fmt: skip
    for (name, (tensor, kind)), parts in zip(of.items(), names, strict=True):
        cast = engine.quantised(tensor, kind)
        for part, attribute in parts.items():
            capture = found[f"{name}.{part}"]
            assert torch.equal(capture.value, getattr(cast, attribute))
            assert "E4M3" in capture.attributes["tensor_context"]
            assert (capture.key.layer, capture.key.module) == (3, "layers.3.fc")
    assert {"grad_output", "grad_output.rowwise_data", "grad_input", "grad_weight", "output"} <= found.keys()


@pytest.mark.parametrize("reentrant", [False, True])
def test_evaluations_recomputes_and_steps_that_are_not_selected_are_not_inspected(
    inspection: Any, engine: Any, sink: MemorySink, reentrant: bool
) -> None:
    sink.config = ClientConfig(steps="1")
    model = nn.Sequential(engine.Linear(8, 8, name="fc"), engine.DotProductAttention())
    watch(model, select="1", steps="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 8, requires_grad=True)
    for _ in range(3):
        with torch.no_grad():
            model.eval()[0](x)
        checkpoint(model.train()[0], x, use_reentrant=reentrant).sum().backward()
        optimizer.step()
        sink.context.optimizer_stepped()
        inspection.step()
    found = by_call(sink.captured)
    assert {key[2:] for key in found} == {(1, 0, 0)}
    assert {"input", "grad_output", "grad_weight"} <= {key[1] for key in found}


def test_a_watched_model_is_not_held(engine: Any, sink: MemorySink) -> None:
    model = Model(engine)
    watch(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
