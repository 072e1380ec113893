"""What emulate puts on a model, what it leaves alone, and that nothing of it stays."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from capd_client import emulate
from capd_client.errors import ConfigError
from capd_client.formats import qdq
from tests.kit.emulated.patched import patched


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Scaled(nn.Linear):
    """A linear with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * functional.linear(input, self.weight, self.bias)


class Strange(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input @ self.weight.mT


X = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("word", ["none", "bf16", "fp16", "fp32"])
def test_the_words_of_plain_runs_install_nothing(word: str) -> None:
    model, before = Model(), patched()
    state = [dict(vars(module)) for module in model.modules()]

    emulation = emulate(model, word)

    assert emulation.recipe.is_none
    assert emulation.modules == ()
    assert all(a is b for a, b in zip(patched(), before, strict=True))
    assert [dict(vars(module)) for module in model.modules()] == state


def test_what_is_emulated_is_named_and_removing_it_restores_everything() -> None:
    model, before = Model(), patched()
    plain, keys = model(X), list(model.state_dict())

    emulation = emulate(model, "mxfp4")
    while_emulated, names = model(X), list(model.state_dict())
    emulation.remove()
    emulation.remove()

    assert emulation.modules == ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head")
    assert not torch.equal(while_emulated, plain)
    assert names == keys
    assert torch.equal(model(X), plain)
    assert all(a is b for a, b in zip(patched(), before, strict=True))


def test_two_models_have_recipes_of_their_own_and_end_in_any_order() -> None:
    one, two = nn.Linear(32, 8), nn.Linear(32, 8)
    plain = two(X)
    first, second = emulate(one, "mxfp8"), emulate(two, "mxfp4")

    for module, name in ((one, "mxfp8"), (two, "mxfp4")):
        assert torch.equal(module(X), functional.linear(qdq(X, name), qdq(module.weight, name), module.bias))
    first.remove()
    assert not torch.equal(two(X), plain)
    second.remove()
    assert torch.equal(two(X), plain)


def test_a_module_is_not_emulated_twice() -> None:
    model = Model()
    emulate(model, "mxfp8", include="layers.0.*")

    with pytest.raises(ConfigError, match=r"layers\.0\.up is already emulated"):
        emulate(model, "mxfp4")

    assert emulate(model, "mxfp4", exclude=["layers.0.*"]).modules == ("layers.1.up", "layers.1.down", "head")


def test_globs_choose_modules_by_their_names_without_wrappers() -> None:
    model = Model()
    model.layers[1] = torch.compile(model.layers[1], backend="eager")  # type: ignore[assignment]
    wrapped = nn.ModuleDict({"module": model})

    emulation = emulate(wrapped, {"linear": "mxfp8", "include": ["layers.1.*", "head"]}, exclude="*.down")

    assert emulation.modules == ("layers.1.up", "head")
    assert emulation.recipe.exclude == ("*.down",)


def test_globs_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"leave none of 5 modules to emulate, such as 'layers\.0\.up'"):
        emulate(Model(), "mxfp8", include=["decoder.*"])


def test_copies_and_pickles_are_plain_models() -> None:
    model = Model()
    plain = model(X)
    emulate(model, "mxfp4")

    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(model),
        copy.copy(model.head),
        pickle.loads(pickle.dumps(model)),  # noqa: S301  # made a moment ago
        torch.load(saved, weights_only=False),
    ]

    assert b"capd" not in saved.getvalue()
    assert not any("_capd_emulation" in vars(module) for one in copies for module in one.modules())
    for one in (copies[0], copies[2], copies[3]):
        assert torch.equal(one(X), plain)
    assert torch.equal(copies[1](X), functional.linear(X, model.head.weight, model.head.bias))


def test_a_copy_by_hand_is_not_emulated_either() -> None:
    module, twin = nn.Linear(32, 8), nn.Linear(32, 8)
    emulate(module, "mxfp4")

    twin.__dict__.update(module.__dict__)

    assert torch.equal(twin(X), functional.linear(X, module.weight, module.bias))


def test_a_subclass_that_calls_the_function_is_emulated_through_it() -> None:
    module = Scaled(32, 8)

    emulation = emulate(module, "hifp8")

    assert emulation.modules == ("Scaled",)
    quantised = functional.linear(qdq(X, "hifp8"), qdq(module.weight, "hifp8"), module.bias)
    assert torch.equal(module(X), 2 * quantised)


class Router(nn.Module):
    """As those of transformers' mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 32))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Experts(nn.Module):
    """As those of transformers 5, which gives every such class this method."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 8, 32))

    def _apply_gate(self, x: Tensor) -> Tensor:
        return x


def wrapped_on_the_instance() -> nn.Module:
    module = nn.Linear(32, 8)
    module.forward = module.forward  # type: ignore[method-assign]
    return module


def with_a_weight_of_bytes() -> nn.Module:
    module = nn.Linear(32, 8)
    module.weight = nn.Parameter(torch.zeros(8, 32, dtype=torch.int8), requires_grad=False)
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Strange(32, 8), "its own way"),
        (wrapped_on_the_instance(), "on the instance"),
        (with_a_weight_of_bytes(), "its weight is torch.int8"),
        (Router(), "its own weight"),
        (Experts(), "parts of one parameter"),
    ],
)
def test_what_cannot_be_emulated_is_left_alone_and_said(
    module: nn.Module, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capd_client.emulation import emulation as of
    from capd_client.process.log import RateLimitedLog

    monkeypatch.setattr(of, "_notices", RateLimitedLog())
    with caplog.at_level(logging.WARNING, "capd_client"):
        emulation = emulate(nn.ModuleDict({"odd": module, "fine": nn.Linear(32, 8)}), "mxfp8")

    assert emulation.modules == ("fine",)
    assert reason in emulation.left_alone["odd"]
    assert "odd: " in caplog.text


def test_a_glob_that_names_no_product_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capd_client.emulation import emulation as of
    from capd_client.process.log import RateLimitedLog

    monkeypatch.setattr(of, "_notices", RateLimitedLog())
    model = nn.ModuleDict({"head": nn.Linear(32, 8), "layer": nn.Sequential(nn.Linear(32, 8))})
    with caplog.at_level(logging.WARNING, "capd_client"):
        emulation = emulate(model, "mxfp8", exclude=["haed", "layer", "head"])

    assert emulation.modules == ("layer.0",)
    assert "exclude 'haed' matches none of the 2 modules that multiply" in caplog.text
    assert "exclude 'layer' matches" in caplog.text
    assert "exclude 'head' matches" not in caplog.text


def test_linears_left_alone_are_no_matter_of_a_recipe_for_attention() -> None:
    assert emulate(Router(), {"qk": "mxfp8"}).left_alone == {}


def test_a_model_without_products_is_no_error() -> None:
    emulation = emulate(nn.ReLU(), "mxfp8")

    assert emulation.modules == ()


def test_a_recipe_that_cannot_be_used_leaves_the_model_as_it_is() -> None:
    model, before = Model(), patched()

    with pytest.raises(ConfigError, match="allowed are none, bf16, fp16, fp8"):
        emulate(model, "mxfp9")

    assert all(a is b for a, b in zip(patched(), before, strict=True))


def test_an_emulation_ends_with_its_block() -> None:
    module: Any = nn.Linear(32, 8)
    plain = module(X)

    with emulate(module, "mxfp4"):
        assert not torch.equal(module(X), plain)
    assert torch.equal(module(X), plain)
