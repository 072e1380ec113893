"""A linear in another number format, against a reference that is written from the definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from capd_client import emulate
from capd_client.formats import qdq
from tests.kit.emulated import reference

TOKENS, IN, OUT = (5, 8), 40, 35  # none of them a multiple of 32, nor of 16


def case(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear, its input and the gradient of its output: float32 values, spread over some binades."""
    module = nn.Linear(IN, OUT, bias=bias).to(dtype)
    x = (
        (torch.randn(*TOKENS, IN) * torch.exp2(torch.randint(-6, 6, (*TOKENS, IN))))
        .to(dtype)
        .requires_grad_()
    )
    g = (torch.randn(*TOKENS, OUT) * 1e-3).to(dtype)
    return module, x, g


def array(tensor: Tensor) -> Any:
    return tensor.detach().double().reshape(-1, tensor.shape[-1]).numpy()


def run(module: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """Y, dX and the gradients of the parameters."""
    y = module(x)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], g)]


@pytest.mark.parametrize("name", [name for name in reference.FORMATS if name != "none"])
def test_all_three_products_are_those_of_the_definition(name: str) -> None:
    module, x, g = case()
    expected = reference.linear(
        array(x), array(module.weight), module.bias.detach().numpy(), array(g), name, name
    )

    emulate(module, {"linear": reference.option(name)})

    for found, want in zip(run(module, x, g), expected, strict=True):
        np.testing.assert_allclose(found.detach().numpy().reshape(want.shape), want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backward", ["none", "mxfp8 e5m2"])
def test_the_backward_has_a_format_of_its_own_or_none(backward: str) -> None:
    module, x, g = case()
    expected = reference.linear(
        array(x), array(module.weight), module.bias.detach().numpy(), array(g), "mxfp4", backward
    )
    given = "none" if backward == "none" else reference.option(backward)

    emulate(module, {"linear": "mxfp4", "backward": given})

    for found, want in zip(run(module, x, g), expected, strict=True):
        np.testing.assert_allclose(found.detach().numpy().reshape(want.shape), want, rtol=1e-12, atol=1e-14)


def test_the_products_of_the_mx_formats_are_those_of_torchao() -> None:
    from tests.kit.formats.packages import mx_through_torchao

    def through(t: Tensor) -> Tensor:
        return mx_through_torchao(t.contiguous(), "e4m3", "floor")[1]

    module, x, g = nn.Linear(64, 96, bias=False), torch.randn(32, 64, requires_grad=True), torch.randn(32, 96)
    w = module.weight.detach()
    expected = [
        through(x.detach()) @ through(w).t(),
        through(g) @ through(w.t()).t(),
        through(g.t()) @ through(x.detach().t()).t(),
    ]

    emulate(module, {"linear": "mxfp8"})

    for found, want in zip(run(module, x, g), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_the_weight_can_have_a_format_of_its_own() -> None:
    module, x, g = case(torch.float32, bias=False)

    emulate(module, {"linear": {"format": "nvfp4", "weight": {"format": "nvfp4", "block": [16, 16]}}})
    y, dx, _ = run(module, x, g)

    tiles = qdq(module.weight, "nvfp4", block=(16, 16))
    assert torch.equal(y, functional.linear(qdq(x, "nvfp4"), tiles))
    rows = g.reshape(-1, OUT)
    tiles = qdq(module.weight, "nvfp4", block=(16, 16), axis=0)
    torch.testing.assert_close(dx.reshape(-1, IN), qdq(rows, "nvfp4") @ tiles)


def test_a_gradient_that_is_rounded_stochastically_is_right_on_average() -> None:
    module, x, g = case(bias=False)
    module.weight.data.copy_(qdq(module.weight, "mxfp4", axis=0))  # so that only dY is rounded
    nearest = {"format": "mxfp4", "scale_mode": "rceil"}  # by which nothing saturates
    exact = g @ module.weight.detach()
    with emulate(module, {"linear": nearest}):
        error = (run(module, x, g)[1] - exact).norm()

    emulate(module, {"linear": {**nearest, "gradient_rounding": "stochastic"}})
    drawn = torch.stack([run(module, x, g)[1] for _ in range(60)])

    assert not torch.equal(drawn[0], drawn[1])
    assert (drawn[0] - exact).norm() > error
    assert (drawn.mean(0) - exact).norm() < error / 2


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "fp8", "hifp8", "fp16"])
def test_under_autocast_the_operands_are_quantised_as_the_product_would_have_them(name: str) -> None:
    module, x, g = case(torch.float32)
    half = torch.bfloat16
    expected = functional.linear(
        qdq(x.to(half), name), qdq(module.weight.to(half), name), module.bias.to(half)
    )

    emulate(module, {"linear": {"format": name}})
    with torch.autocast("cpu", half):
        y = module(x)
    gradients = torch.autograd.grad(y, [x, *module.parameters()], g.to(half))

    assert y.dtype is half
    assert torch.equal(y, expected)
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(IN,), (0, IN), (3, 0, IN), (1, IN), (2, 3, 4, IN)])
def test_results_have_the_shape_and_the_dtype_that_they_have_without(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    module, x = nn.Linear(IN, OUT).to(dtype), torch.randn(shape, dtype=dtype).requires_grad_()
    plain = run(module, x, torch.ones(*shape[:-1], OUT, dtype=dtype))

    emulate(module, "mxfp4")
    found = run(module, x, torch.ones(*shape[:-1], OUT, dtype=dtype))

    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in plain]


def test_a_linear_without_input_features_gives_its_bias() -> None:
    module = nn.Linear(4, 3)
    module.weight = nn.Parameter(torch.empty(3, 0))

    emulate(module, "mxfp8")

    assert torch.equal(module(torch.empty(2, 0)), module.bias.expand(2, 3))


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the quantisations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "capd::quantise" in str(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "frozen", "count"),
    [("mxfp8", "", 6), ("mxfp8", "weight", 4), ("mxfp8", "x", 4), ("hifp8", "", 5), ("fp8", "", 5)],
)
def test_nothing_is_quantised_that_no_product_needs(name: str, frozen: str, count: int) -> None:
    module, x, g = case(torch.float32)
    module.weight.requires_grad_(frozen != "weight")
    x = x.detach().requires_grad_(frozen != "x")
    emulate(module, {"linear": name})

    with Counting() as counted:
        module(x).backward(g)

    assert counted.count == count
    assert (module.weight.grad is None) == (frozen == "weight")
    assert (x.grad is None) == (frozen == "x")


def test_only_the_operands_themselves_are_kept_for_the_backward() -> None:
    module, x, _ = case(torch.float32)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    emulate(module, "mxfp8")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)

    assert sorted(kept) == sorted([x.data_ptr(), module.weight.data_ptr()])


def test_gradients_can_be_asked_for_twice_and_add_up() -> None:
    module, x, g = case(torch.float32)
    emulate(module, "mxfp8")

    y = module(x)
    first = torch.autograd.grad(y, list(module.parameters()), g, retain_graph=True)
    again = torch.autograd.grad(y, list(module.parameters()), g)
    for _ in range(2):
        module(x).backward(g)

    assert all(map(torch.equal, first, again))
    assert all(
        torch.equal(p.grad, 2 * gradient) for p, gradient in zip(module.parameters(), first, strict=True)
    )


def test_second_derivatives_pass_the_quantisers_straight_through() -> None:
    module, x, _ = case()
    emulate(module, {"linear": "mxfp8"})

    (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)

    w = qdq(module.weight, "mxfp8", axis=0)
    of_y = 2 * w.sum(1)  # dX = q(2 Y) · w, of which the quantiser counts as if it were not there
    assert torch.allclose(second, (qdq(of_y, "mxfp8") @ w).expand_as(second))


@pytest.mark.parametrize(
    ("training", "with_gradients", "asked", "emulated"),
    [
        (True, True, False, True),
        (True, False, False, True),  # as in the first pass of a checkpointed segment
        (False, True, False, True),
        (False, False, False, False),
        (False, False, True, True),
    ],
)
def test_an_evaluation_is_emulated_where_that_is_asked_for(
    training: bool, with_gradients: bool, asked: bool, emulated: bool
) -> None:
    module, x, _ = case(torch.float32)
    plain = module(x)

    emulate(module, "mxfp4", evaluation=asked)
    module.train(training)
    with torch.set_grad_enabled(with_gradients):
        assert torch.equal(module(x), plain) != emulated


def test_a_weight_that_two_layers_share_gets_both_gradients() -> None:
    first, second = nn.Linear(IN, IN, bias=False), nn.Linear(IN, IN, bias=False)
    second.weight = first.weight
    model, x, g = nn.Sequential(first, second), torch.randn(4, IN), torch.randn(4, IN)
    emulate(model, "mxfp8")
    hidden = model[0](x)
    (upper,) = torch.autograd.grad(model[1](hidden.detach()), second.weight, g)
    through = hidden.detach().requires_grad_()
    (into,) = torch.autograd.grad(model[1](through), through, g)
    (lower,) = torch.autograd.grad(model[0](x), first.weight, into)

    model(x).backward(g)

    torch.testing.assert_close(first.weight.grad, upper + lower)


@pytest.mark.parametrize("call", [lambda m, x: m(x), lambda m, x: m(input=x)])
def test_the_input_is_given_by_position_or_by_name(call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    module, x, _ = case(torch.float32)
    emulate(module, "hifp8")

    assert torch.equal(
        call(module, x), functional.linear(qdq(x, "hifp8"), qdq(module.weight, "hifp8"), module.bias)
    )
