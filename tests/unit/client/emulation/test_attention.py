"""Attention with quantised operands, on both levels, with every argument that F.scaled_dot_product_attention takes."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as imported

from capd_client import emulate
from capd_client.formats import qdq
from tests.kit.emulated import reference
from tests.kit.tiers import rows

QUERIES, KEYS, WIDTH = 21, 37, 24
BOTH = {"qk": "mxfp8", "pv": "mxfp8"}


class Attention(nn.Module):
    """Hands everything on."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return functional.scaled_dot_product_attention(*args, **kwargs)


class Imported(nn.Module):
    """Has the function under a name of its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return imported(q, k, v)


def operands(
    *, heads: int = 4, kv_heads: int = 4, keys: int = KEYS, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    shapes = [(2, heads, QUERIES, WIDTH), (2, kv_heads, keys, WIDTH), (2, kv_heads, keys, WIDTH)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


MASK = torch.rand(QUERIES, KEYS) < 0.6
MASK[3] = False  # a query that sees no key
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "of booleans": {"attn_mask": MASK},
    "added": {"attn_mask": torch.randn(2, 1, QUERIES, KEYS).double()},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("level", ["straight-through", "exact"])
@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_only_the_operands_are_others(level: str, arguments: dict[str, Any]) -> None:
    """A format that changes nothing (bf16 of bf16 values) gives torch's own results and gradients."""
    q, k, v = operands(kv_heads=2 if "enable_gqa" in arguments else 4)
    for t in (q, k, v):
        t.data = t.data.bfloat16().double()
    g = torch.randn(2, 4, QUERIES, WIDTH).double()
    plain = functional.scaled_dot_product_attention(q, k, v, **arguments)
    expected = [plain, *torch.autograd.grad(plain, [q, k, v], g)]
    module = Attention()

    emulate(module, {"qk": {"format": "bf16", "backward": "none"}, "level": level})
    found = module(q, k, v, **arguments)

    for a, b in zip([found, *torch.autograd.grad(found, [q, k, v], g)], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("level", ["straight-through", "exact"])
def test_dropout_draws_as_torch_does(level: str) -> None:
    q, k, v = operands()
    module = Attention()
    torch.manual_seed(5)
    plain = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    after = torch.rand(())

    emulate(module, {"pv": {"format": "fp16", "backward": "none"}, "level": level})
    torch.manual_seed(5)
    found = module(q, k, v, dropout_p=0.3)

    torch.testing.assert_close(found, plain, rtol=2e-3, atol=2e-3)
    assert torch.equal(torch.rand(()), after)


def test_straight_through_the_fused_kernel_gets_quantised_operands() -> None:
    q, k, v = operands(dtype=torch.float32)
    g = torch.randn(2, 4, QUERIES, WIDTH)
    quantised: Any = [qdq(q, "mxfp4"), qdq(k, "mxfp4"), qdq(v, "nvfp4", axis=-2)]
    for t in quantised:
        t.requires_grad_()
    a, b, c = quantised
    expected = functional.scaled_dot_product_attention(a, b, c, is_causal=True)
    gradients = torch.autograd.grad(expected, quantised, g)
    module = Attention()

    emulate(module, {"qk": "mxfp4", "pv": "nvfp4"})
    found = module(query=q, key=k, value=v, is_causal=True)

    assert torch.equal(found, expected)
    assert all(map(torch.equal, torch.autograd.grad(found, [q, k, v], g), gradients))


@pytest.mark.parametrize(
    ("qk", "pv"), [("mxfp8", "mxfp8"), ("hifp8", "mxfp4"), ("none", "nvfp4"), ("mxfp6", "none")]
)
@pytest.mark.parametrize("causal", rows([False, True], [True]))
def test_exact_attention_is_that_of_the_definition(qk: str, pv: str, causal: bool) -> None:
    q, k, v = (t.detach()[:1, :1].requires_grad_() for t in operands(keys=QUERIES if causal else KEYS))
    g = torch.randn(1, 1, QUERIES, WIDTH).double()
    one, two, three, four = (t.detach()[0, 0].numpy() for t in (q, k, v, g))
    expected = reference.attention(one, two, three, four, qk, pv, causal=causal)
    module = Attention()

    emulate(module, {"qk": qk, "pv": pv, "level": "exact"})
    found = module(q, k, v, is_causal=causal)

    # Where softmax differs in the last bit of float64, a value on a tie is rounded the other way: none is, here.
    for a, b in zip([found, *torch.autograd.grad(found, [q, k, v], g)], expected, strict=True):
        np.testing.assert_allclose(a.detach()[0, 0].numpy(), b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("level", ["straight-through", "exact"])
def test_the_result_has_the_dtype_that_it_has_without(level: str) -> None:
    q, k, v = operands(dtype=torch.float32)
    module = Attention()
    emulate(module, {**BOTH, "level": level})

    with torch.autocast("cpu", torch.bfloat16):
        assert module(q, k, v).dtype is torch.bfloat16
    assert module(*(t.half() for t in (q, k, v))).dtype is torch.float16


def test_a_mask_and_a_causal_one_are_refused_as_torch_refuses_them() -> None:
    module = Attention()
    emulate(module, {**BOTH, "level": "exact"})

    with pytest.raises(RuntimeError, match="is_causal"):
        module(*operands(), attn_mask=MASK, is_causal=True)


def test_a_function_that_was_imported_before_is_found() -> None:
    q, k, v = operands(dtype=torch.float32)
    module = Imported()
    plain, before = module(q, k, v), imported

    with emulate(module, BOTH):
        assert not torch.equal(module(q, k, v), plain)

    assert imported is before


def test_no_attribute_of_what_a_module_holds_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lazy module, as TensorBoard has some, would import what it stands for."""
    asked: list[str] = []

    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> object:
            asked.append(name)
            raise ImportError(name)

    monkeypatch.setitem(globals(), "lazy", Lazy("lazy"))
    emulate(Attention(), BOTH)

    assert asked == []


def test_attention_outside_of_the_model_is_not_emulated() -> None:
    q, k, v = operands(dtype=torch.float32)
    plain = functional.scaled_dot_product_attention(q, k, v)

    emulate(Attention(), BOTH)

    assert torch.equal(functional.scaled_dot_product_attention(q, k, v), plain)
    assert torch.equal(Attention()(q, k, v), plain)


def test_multihead_attention_is_its_linears_and_its_attention() -> None:
    module = nn.MultiheadAttention(32, 2, batch_first=True)
    x = torch.randn(2, 9, 32, requires_grad=True)
    packed = functional.linear(qdq(x, "mxfp4"), qdq(module.in_proj_weight, "mxfp4"), module.in_proj_bias)
    q, k, v = (t.view(2, 9, 2, 16).transpose(1, 2) for t in packed.chunk(3, -1))
    attended = functional.scaled_dot_product_attention(
        qdq(q, "mxfp8"), qdq(k, "mxfp8"), qdq(v, "mxfp8", axis=-2)
    )
    merged = attended.transpose(1, 2).reshape(2, 9, 32)
    expected = functional.linear(
        qdq(merged, "mxfp4"), qdq(module.out_proj.weight, "mxfp4"), module.out_proj.bias
    )

    emulation = emulate(module, {"linear": "mxfp4", **BOTH})
    found, _ = module(x, x, x, need_weights=False)

    assert emulation.modules == ("MultiheadAttention",)
    torch.testing.assert_close(found, expected)


def test_attention_that_returns_its_weights_is_left_alone_and_said(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.MultiheadAttention(32, 2, batch_first=True)
    x = torch.randn(2, 9, 32)
    plain, _ = module(x, x, x)

    emulate(module, BOTH)
    with caplog.at_level(logging.WARNING, "capd_client"):
        found, _ = module(x, x, x)

    assert torch.equal(found, plain)
    assert "need_weights" in caplog.text
