"""Models of transformers with emulation: Conv1D and both ways to write attention, and a Llama that trains."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import capd_client
from capd_client.formats import qdq
from tests.integration.emulation.emulated_formulas import close, exact_attention
from tests.integration.emulation.test_emulated_jobs import job

transformers = pytest.importorskip("transformers")

TOKENS, HEADS, SIZE = 32, 2, 32
EXACT = {"qk": "mxfp8", "pv": "mxfp4", "level": "exact"}

pytestmark = pytest.mark.timeout(240)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def test_a_conv1d_multiplies_what_is_quantised_along_each_products_contraction() -> None:
    layer = transformers.pytorch_utils.Conv1D(96, 64)
    nn.init.normal_(layer.bias)
    x, dy, q = leaf(2, TOKENS, 64), leaf(2, TOKENS, 96).detach(), partial(qdq, fmt="mxfp8")
    w, rows, dy_rows = layer.weight.detach(), x.detach().flatten(0, 1), dy.flatten(0, 1)

    with capd_client.emulate(layer, {"linear": "mxfp8"}) as emulation:
        output = layer(x)
        output.backward(dy)
    assert emulation.modules == ("Conv1D",)
    close(output.detach(), q(x.detach()) @ q(w, axis=0) + layer.bias.detach())
    close(x.grad, q(dy) @ q(w).T)
    close(layer.weight.grad, q(rows, axis=0).T @ q(dy_rows, axis=0))
    close(layer.bias.grad, dy_rows.sum(0))
    close(layer(x).detach(), x.detach() @ w + layer.bias.detach())


def attention(implementation: str) -> Any:
    """A Llama's attention whose projections, and whose rotation, change nothing."""
    modeling = transformers.models.llama.modeling_llama
    config = transformers.LlamaConfig(
        hidden_size=HEADS * SIZE, num_attention_heads=HEADS, attn_implementation=implementation
    )
    layer = modeling.LlamaAttention(config, layer_idx=0)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        nn.init.eye_(getattr(layer, name).weight)
    return layer.train()


def test_attention_in_one_kernel_is_left_alone_and_said() -> None:
    layer = attention("flex_attention")

    emulation = capd_client.emulate(nn.ModuleDict({"attention": layer}), "mxfp8")

    assert emulation.left_alone == {"attention": "flex_attention is one kernel"}
    assert "attention" not in emulation.modules
    assert "attention.q_proj" in emulation.modules
    emulation.remove()


def attend(layer: Any, x: Tensor, mask: Tensor) -> Tensor:
    still = torch.ones(1, TOKENS, SIZE), torch.zeros(1, TOKENS, SIZE)
    output: Tensor = layer(x, position_embeddings=still, attention_mask=mask)[0]
    return output


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_multiplies_what_is_quantised_in_both_products(implementation: str) -> None:
    layer, x, dy = (
        attention(implementation),
        leaf(2, TOKENS, HEADS * SIZE),
        leaf(2, TOKENS, HEADS * SIZE).detach(),
    )
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)
    heads = x.detach().unflatten(-1, (HEADS, SIZE)).transpose(1, 2)

    with capd_client.emulate(layer, EXACT) as emulation:
        output = attend(layer, x, mask[None, None])
        output.backward(dy)
    assert emulation.modules == ("LlamaAttention",)
    expected = exact_attention(
        heads,
        heads,
        heads,
        dy.unflatten(-1, (HEADS, SIZE)).transpose(1, 2),
        qk="mxfp8",
        pv="mxfp4",
        mask=mask,
    )
    close(output.detach(), expected["output"].transpose(1, 2).flatten(2))
    gradient = sum(expected[f"grad_{name}"] for name in ("query", "key", "value"))
    close(x.grad, gradient.transpose(1, 2).flatten(2))


def test_straight_through_eager_and_sdpa_quantise_the_same_operands() -> None:
    x, mask, results = (
        leaf(2, TOKENS, HEADS * SIZE),
        torch.full((1, 1, TOKENS, TOKENS), -torch.inf).triu(1),
        [],
    )
    for implementation in ("eager", "sdpa"):
        layer = attention(implementation)
        plain = attend(layer, x, mask)
        with capd_client.emulate(layer, {"qk": "mxfp4", "pv": "mxfp4"}):
            output = attend(layer, x, mask)
        assert (output - plain).norm() > 1e-2 * plain.norm()
        results.append((output.detach(), *torch.autograd.grad(output.square().sum(), x)))

    for ours, other in zip(*results, strict=True):
        close(ours, other)


def test_a_checkpointed_eager_layer_recomputes_what_it_computed() -> None:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, n_positions=TOKENS, vocab_size=32, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_implementation="eager",
    )  # fmt: skip
    plain = transformers.GPT2LMHeadModel(config).train()
    tokens, gradients = torch.arange(TOKENS)[None], []
    for kind in (None, True, False):
        model = copy.deepcopy(plain)
        if kind is not None:
            model.activation_checkpointing_enable({"use_reentrant": kind})
        with capd_client.emulate(model, {"linear": "mxfp8", **EXACT}) as emulation:
            model(tokens, labels=tokens).loss.backward()
        assert {"transformer.h.0.attn", "transformer.h.1.mlp.c_fc", "lm_head"} <= set(emulation.modules)
        gradients.append([parameter.grad for parameter in model.parameters()])

    for again in gradients[1:]:
        assert all(torch.equal(ours, other) for ours, other in zip(gradients[0], again, strict=True))


@pytest.mark.fault
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_llama_trains_in_the_format_that_capd_run_names(implementation: str, tmp_path: Path) -> None:
    model = ("--llama", implementation)
    bare = job(tmp_path / "bare", *model, capture=None)
    run = job(tmp_path / "run", *model, capture=("--quant-type", "mxfp8"))
    own = job(tmp_path / "own", *model, "--emulate", "mxfp8", "--watch")

    assert run.losses == own.losses != bare.losses
    first, other = (float.fromhex(done.losses[0][0]) for done in (bare, run))
    assert abs(first - other) < 0.05  # another format, not another model
    assert run.emulations() == own.emulations() != {"none"}
