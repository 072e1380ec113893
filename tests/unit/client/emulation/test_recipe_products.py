"""A linear in a recipe by products: against the definitions, written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from capd_client import emulate
from capd_client.config.recipe import Recipe
from capd_client.emulation.recipe_products import after_product, quantised_operands
from capd_client.emulation.words import words_of
from capd_client.formats import FormatError, qdq
from capd_client.formats.special.deviation import clip_mask
from capd_client.formats.transforms.hadamard import hadamard, inverse_hadamard
from capd_client.recipes.presets import PRESETS

TOKENS, IN, OUT = 256, 128, 384


def case(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    module = nn.Linear(IN, OUT, bias=False).to(dtype)
    x = (torch.randn(TOKENS, IN) * torch.exp2(torch.randint(-3, 3, (TOKENS, 1)))).to(dtype).requires_grad_()
    return module, x, (torch.randn(TOKENS, OUT) * 1e-3).to(dtype)


def run(module: nn.Linear, x: Tensor, g: Tensor, seed: int = 7) -> list[Tensor]:
    """Y, dX and dW."""
    torch.manual_seed(seed)
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y, [x, module.weight], g)]


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found, expected.to(found.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PRESETS)
def test_training_computes_what_the_operands_of_the_recipe_give(name: str, dtype: torch.dtype) -> None:
    module, x, g = case(dtype)
    words = words_of(Recipe.of(name).linear)
    assert words is not None

    emulate(module, name)
    y, dx, dw = run(module, x, g)

    torch.manual_seed(7)
    plain, w = x.detach(), module.weight.detach()
    a, b = quantised_operands("y", {"x": plain, "w": w}, words).quantised
    assert torch.equal(y, nn.functional.linear(a, b))
    a, b = quantised_operands("dx", {"g": g, "w": w}, words).quantised
    assert torch.equal(dx, after_product("dx", a @ b, plain, words))
    a, b = quantised_operands("dw", {"g": g, "x": plain}, words).quantised
    assert torch.equal(dw, after_product("dw", a.t() @ b, w, words))
    # It is no identity, and no other function.
    exact = [plain @ w.t(), g @ w, g.t() @ plain]
    for found, want in zip((y, dx, dw), exact, strict=True):
        error = (found.float() - want.float()).norm() / want.float().norm()
        assert error < 0.5
    assert sum(not torch.equal(found, want) for found, want in zip((y, dx, dw), exact, strict=True)) >= 2


def test_the_recipe_of_transformer_engine_is_its_definition() -> None:
    module, x, g = case(torch.bfloat16)
    w = module.weight.detach()
    emulate(module, "nvfp4-te")

    y, dx, dw = run(module, x, g)

    assert same(y, nn.functional.linear(qdq(x, "nvfp4"), qdq(w, "nvfp4", block=(16, 16))))
    torch.manual_seed(7)
    rows = qdq(g, "nvfp4", rounding="stochastic")
    assert same(dx, rows @ qdq(w, "nvfp4", block=(16, 16), axis=0))
    turned_g, turned_x = (hadamard(t.detach(), 16, axis=0, signs="te") for t in (g, x))
    columns = qdq(turned_g, "nvfp4", rounding="stochastic", axis=0)
    assert same(dw, columns.t() @ qdq(turned_x, "nvfp4", axis=0))


def test_quartet_passes_gradients_where_the_forward_did_not_clip() -> None:
    module, x, g = case()
    w = module.weight.detach()
    emulate(module, "quartet")

    y, dx, _ = run(module, x, g)

    turned_x, turned_w = hadamard(x.detach(), 32), hadamard(w, 32)
    assert same(
        y,
        nn.functional.linear(
            qdq(turned_x, "mxfp4", scale_mode="std"), qdq(turned_w, "mxfp4", scale_mode="std")
        ),
    )
    # Back in the transformed domain, what was clipped has no gradient.
    kept = clip_mask(turned_x.reshape(-1, 32)).view(TOKENS, IN)
    back = hadamard(dx, 32)
    assert not kept.all()
    assert back[~kept].abs().max() < 1e-5 * back.abs().max()
    assert (inverse_hadamard(back, 32) - dx).abs().max() < 1e-5 * dx.abs().max()


USES: dict[str, dict[str, dict[str, str]]] = {
    "x.fprop": {"fprop": {"x": "mxfp4"}}, "w.fprop": {"fprop": {"w": "mxfp4"}}, "g.dgrad": {"dgrad": {"g": "mxfp4"}},
    "w.dgrad": {"dgrad": {"w": "mxfp4"}}, "g.wgrad": {"wgrad": {"g": "mxfp4"}}, "x.wgrad": {"wgrad": {"x": "mxfp4"}},
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_each_of_the_six_uses_changes_its_own_product_alone(use: str) -> None:
    module, x, g = case()
    plain = run(module, x, g)

    emulate(module, {"linear": {"fprop": {}, **USES[use]}})

    changed = [not torch.equal(found, before) for found, before in zip(run(module, x, g), plain, strict=True)]
    assert changed == [use.endswith(name) for name in ("fprop", "dgrad", "wgrad")]


@pytest.mark.parametrize("signs", ["none", "seeded"])
def test_a_transform_without_a_format_leaves_the_products(signs: str) -> None:
    module, x, g = case()
    plain = run(module, x, g)
    turn = {"transform": {"kind": "hadamard", "size": 64, "signs": signs}}

    emulate(module, {"linear": {"fprop": turn, "dgrad": turn, "wgrad": turn}})

    for found, before in zip(run(module, x, g), plain, strict=True):
        assert (found - before).norm() <= 1e-6 * before.norm()


def test_draws_differ_and_a_seed_repeats_them() -> None:
    module, x, g = case()
    emulate(module, "mxfp4-rht-sr")

    first, again, other = run(module, x, g), run(module, x, g), run(module, x, g, seed=8)

    assert all(map(torch.equal, first, again))
    assert torch.equal(first[0], other[0])
    assert not torch.equal(first[1], other[1])


def test_a_contraction_that_the_transform_does_not_divide_is_refused_in_words() -> None:
    module = nn.Linear(24, 32)
    emulate(module, {"linear": {"fprop": {"transform": {"kind": "hadamard", "size": 16}}}})

    with pytest.raises(FormatError, match="has 24 values"):
        module(torch.ones(2, 24))


def test_a_second_derivative_is_refused_in_words() -> None:
    module, x, _ = case()
    emulate(module, "nvfp4-te")

    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(module(x).square().sum(), [x], create_graph=True)


def test_a_mask_alone_zeroes_the_gradients_of_what_the_forward_clipped() -> None:
    module, x, g = case()
    # Few uniform weights are beyond the scale.
    nn.init.normal_(module.weight)
    operand = {"format": "mxfp4", "scale_mode": "std"}
    recipe = {"mask": True, "fprop": {"x": operand, "w": operand}}
    w = module.weight.detach()

    emulate(module, {"linear": recipe})
    _, dx, dw = run(module, x, g)

    kept_x = clip_mask(x.detach().view(-1, 32)).view_as(x)
    kept_w = clip_mask(w.view(-1, 32)).view_as(w)
    assert not kept_x.all()
    assert not kept_w.all()
    assert torch.equal(dx, (g @ w) * kept_x)
    assert torch.equal(dw, (g.t() @ x.detach()) * kept_w)
