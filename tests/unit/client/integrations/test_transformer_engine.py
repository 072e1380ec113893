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
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import capd_client
from capd.store.logical.layout import layout_of
from capd_client.config.settings import ClientConfig
from capd_client.integrations import megatron_ranks, te_inspection
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


@pytest.mark.parametrize("has_fp8", [False, True])
def test_attention_tells_that_it_multiplies_in_fp8(
    engine: Any, sink: MemorySink, monkeypatch: pytest.MonkeyPatch, has_fp8: bool
) -> None:
    name = "transformer_engine.pytorch.quantization"
    recipe = SimpleNamespace(fp8_dpa=has_fp8, fp8_mha=False)
    methods = {"is_fp8_enabled": lambda: True, "get_fp8_recipe": lambda: recipe}
    state = type("FP8GlobalStateManager", (), {each: staticmethod(one) for each, one in methods.items()})
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(FP8GlobalStateManager=state))
    model = Model(engine)
    watch(model, steps="0")
    train(model)
    core = by_call(sink.captured)["layers.0.core", "query", 0, 0, 0]
    assert json.loads(core.metadata).get("attention_variant") == (["fp8"] if has_fp8 else None)


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


class ParallelState:
    """Megatron's groups as one rank of four sees them: two tensor, two context parallel ranks."""

    def __getattr__(self, asked: str) -> Any:
        places = {
            "tensor_model_parallel": (1, 2), "context_parallel": (0, 2), "data_parallel": (0, 1),
            "expert_tensor_parallel": (1, 2), "expert_data_parallel": (0, 1), "expert_model_parallel": (0, 1),
        }  # fmt: skip
        group, _, _ = asked.removeprefix("get_").partition("_world_size" if "world" in asked else "_rank")
        if group not in places:
            raise AttributeError(asked)
        return lambda: places[group]["world_size" in asked]


def test_in_megatron_linears_say_which_part_they_have_after_their_communication(
    engine: Any, sink: MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TELayerNormColumnParallelLinear(engine.LayerNormLinear):  # type: ignore[misc]
        """As Megatron names its own."""

    class TERowParallelLinear(engine.Linear):  # type: ignore[misc]
        """As Megatron names its own."""

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear_fc1 = TELayerNormColumnParallelLinear(4, 8)
            self.linear_fc2 = TERowParallelLinear(8, 4)
            self.linear_fc1.config = SimpleNamespace(gated_linear_unit=True)
            self.linear_fc1.sequence_parallel = self.linear_fc2.sequence_parallel = True
            self.core = engine.DotProductAttention()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear_fc2(self.linear_fc1(x))  # type: ignore[no-any-return]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.experts = Mlp(), nn.Module()
            self.experts.local_experts = nn.ModuleList([Mlp(), Mlp()])
            self.experts.num_local_experts = 2

        def forward(self, x: Tensor) -> Tensor:
            return self.experts.local_experts[1](self.mlp(x))  # type: ignore[no-any-return, index, operator]

    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", ParallelState())
    model = Block()
    handle = watch(model, steps="all", tensors=("input", "weight", "output", "grad_output", "grad_weight"))
    model(torch.randn(3, 2, 4, requires_grad=True)).sum().backward()
    handle.remove()

    found = {(one.key.module, one.key.tensor_name): one.attributes for one in sink.captured}
    tp = {name: attributes.get("tp_placement") for name, attributes in found.items()}
    own = "mlp.linear_fc"
    assert {name: tp[f"{own}1", name] for name in ("input", "weight", "output", "grad_output", "grad_weight")} == {
        "input": "S(0)", "weight": "S(0):2", "output": "S(-1):2", "grad_output": "S(-1):2", "grad_weight": "S(0):2",
    }  # fmt: skip
    assert {name: tp[f"{own}2", name] for name in ("input", "weight", "output", "grad_output", "grad_weight")} == {
        "input": "S(-1)", "weight": "S(1)", "output": "S(0)", "grad_output": "S(0)", "grad_weight": "S(1)",
    }  # fmt: skip
    assert found[f"{own}1", "input"]["cp_placement"] == "Z(0)"
    assert found[f"{own}1", "input"]["mesh"] == ("cp", "tp")
    assert found[f"{own}1", "grad_weight"]["cp_placement"] == "P(sum)"
    assert found[f"{own}1", "input"]["batch_dims"] == ("dp",)
    expert = found["experts.local_experts.1.linear_fc2", "output"]
    assert (expert["etp_placement"], expert["expert"], expert["batch_dims"]) == ("P(sum)", 1, ("edp",))
    assert "tp_placement" not in expert
    for attributes in found.values():
        layout_of(attributes)  # which checks each of them


def test_a_job_may_say_that_it_deals_out_sequences_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", ParallelState())
    module = SimpleNamespace(sequence_parallel=False, config=None)
    for order, placement in (("zigzag", "Z(0)"), ("contiguous", "S(0)")):
        monkeypatch.setenv("CAPD_CP_ORDER", order)
        placed = dict(megatron_ranks.module_placements("mlp.linear_fc2", module, "row"))
        assert dict(placed["input"])["cp_placement"] == placement
        assert dict(placed["weight"])["cp_placement"] == "R"
