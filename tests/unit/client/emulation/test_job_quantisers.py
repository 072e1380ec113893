"""A job that quantises by itself is known by its modules and what it has imported, and others are not taken for one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capd_client.emulation.job_quantisers import TENSOR_SAVER, own_quantiser
from tests.kit.client.models import MLP


class Saving(nn.Module):
    """As tensor_saver's patched layers do it: imported when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        from capd_client.tensor_saver import save_linear_tensors

        save_linear_tensors(x, self.proj.weight, "mxfp8")
        return self.proj(x)


@pytest.fixture(autouse=True)
def _nothing_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("capd_client.tensor_saver", "megatron.core.tensor_saver"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_model_that_only_computes_has_no_quantiser() -> None:
    assert own_quantiser([MLP(), nn.TransformerEncoderLayer(8, 2)]) is None


@pytest.mark.parametrize("name", ["capd_client.tensor_saver", "megatron.core.tensor_saver"])
def test_who_has_imported_tensor_savers_calls_names_its_types(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, ModuleType(name))

    assert own_quantiser([MLP()]) == TENSOR_SAVER


def test_calls_that_a_layer_imports_first_when_it_runs_are_seen_in_its_code() -> None:
    assert own_quantiser([nn.Sequential(MLP(), Saving())]) == TENSOR_SAVER
    assert "capd_client.tensor_saver" not in sys.modules


@pytest.mark.parametrize("name", ["fp8", "fp4", "quant_recipe", "quantization_config"])
def test_a_configuration_with_a_low_precision_recipe_quantises(name: str) -> None:
    model: Any = MLP()
    model.fc1.config = SimpleNamespace(**{name: None})
    assert own_quantiser([model]) is None

    model.fc1.config = SimpleNamespace(**{name: "hybrid"})
    assert own_quantiser([model]) == f"has {name} in its configuration (fc1)"


def test_linears_and_weights_of_a_quantising_library_are_named() -> None:
    float8 = pytest.importorskip("torchao.float8")
    quantised = float8.convert_to_float8_training(
        nn.Sequential(nn.Linear(16, 16)), config=float8.Float8LinearConfig(emulate=True)
    )
    assert own_quantiser([quantised]) == "has torchao's Float8Linear (0)"

    torchao = pytest.importorskip("torchao.quantization")
    held = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    torchao.quantize_(held, torchao.Int8WeightOnlyConfig(), filter_fn=lambda _, name: name == "1")
    reason = own_quantiser([held])
    assert reason is not None
    assert reason.startswith("has weights that are torchao's Int8")
    assert reason.endswith("(1)")


def test_an_autocast_of_transformer_engine_counts_while_it_is_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = ModuleType("transformer_engine.pytorch.fp8")
    state = type("FP8GlobalStateManager", (), {"is_fp8_enabled": staticmethod(lambda: on)})
    module.FP8GlobalStateManager = state
    monkeypatch.setitem(sys.modules, module.__name__, module)

    on = False
    assert own_quantiser([MLP()]) is None
    on = True
    assert own_quantiser([MLP()]) == "trains under TransformerEngine's FP8 autocast"


def test_a_product_of_torch_that_a_library_replaces_quantises(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(*_: Any) -> None: ...

    linear.__module__ = "mx.linear"
    model = MLP()
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "linear", linear)
        assert own_quantiser([model]) == "has F.linear replaced by mx"
    assert own_quantiser([model]) is None
