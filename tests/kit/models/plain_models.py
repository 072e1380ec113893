"""Models in plain PyTorch, each with traits that a simpler tap gets wrong, for the job `plain_job.py`."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import (
    scaled_dot_product_attention,
)  # as many a model does, before anything is watched

BATCH, SEQUENCE, WIDTH, HEADS, HIDDEN, VOCABULARY = 2, 6, 16, 4, 24, 32
HEAD_SIZE = WIDTH // HEADS
LAYERS, CHUNKS = 2, 2
QUANTISED = 64  # bitsandbytes has one scale for 64 elements


class Attention(nn.Module):
    """Self-attention of its own making: q, k and v read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(t) for t in (self.q(x), self.k(x), self.v(x)))
        return self.out(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Block(nn.Module):
    """Attention and an MLP whose activation overwrites the product in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.down(F.relu_(self.up(x)))


class Decoder(nn.Module):
    """A language model whose head has the embedding's weight and is called once per chunk of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.cat([self.head(chunk) for chunk in x.chunk(CHUNKS, 1)], 1)


def split(x: Tensor, heads: int = HEADS) -> Tensor:
    """[batch, positions, width] as [batch, heads, positions, size]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    """The reverse of `split`."""
    return x.transpose(1, 2).flatten(2)


class Variants(nn.Module):
    """Every way to call scaled_dot_product_attention, each in a module of its own, on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)
        self.early = Early()
        self.masked = Masked(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril(1))
        self.biased = Masked(torch.linspace(-1, 1, SEQUENCE * SEQUENCE).view(SEQUENCE, SEQUENCE))
        self.dropped = Dropped()
        self.grouped = Grouped()
        self.crossing = Crossing()
        self.twice = Twice()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(t) for t in self.projection(x).chunk(3, -1))
        ways = (self.early, self.masked, self.biased, self.dropped, self.grouped, self.crossing, self.twice)
        return torch.stack([join(way(q, k, v)) for way in ways]).sum(0)


class Early(nn.Module):
    """The function by the name under which its file imported it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, scale=0.3)


class Masked(nn.Module):
    """A mask of truth values or one that is added; operands as keywords."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=self.mask)


class Dropped(nn.Module):
    """With dropout."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 * self.training)


class Grouped(nn.Module):
    """Fewer heads of k and v than of q."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


class Crossing(nn.Module):
    """Fewer positions of k and v than of q."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, :, :4], v[:, :, :4])


class Twice(nn.Module):
    """Two calls in one forward; the second without gradients, as a target network does."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        once = F.scaled_dot_product_attention(q, k, v)
        with torch.no_grad():
            target = F.scaled_dot_product_attention(v, k, q)
        return once + target


class Experts(nn.Module):
    """Experts with as many rows as fall to them: none, sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        x = self.inlet(x)
        parts = [expert(x[choice == number]) for number, expert in enumerate(self.experts)]
        return torch.cat(parts)


class Attentions(nn.Module):
    """nn.MultiheadAttention in all its ways: what it projects, and how it attends."""

    def __init__(self) -> None:
        super().__init__()
        mha = partial(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True)
        self.packed = mha()  # q, k and v in one product
        self.memory = mha(bias=False)  # k and v in one product
        self.apart = mha()  # one product each, of parts of one weight
        self.sizes = mha(kdim=HIDDEN, vdim=HEAD_SIZE)  # one weight each
        self.weighing = mha(dropout=0.2)  # returns its weights, so does not call scaled_dot_product_attention
        self.longer = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True, add_zero_attn=True)
        self.to_hidden = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        late = x[:, : SEQUENCE - 2]
        mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        y = self.packed(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        y = y + self.memory(x, late, late, need_weights=False)[0]
        y = y + self.apart(x, late, late * 2, need_weights=False)[0]
        y = y + self.sizes(x, self.to_hidden(x), x[..., :HEAD_SIZE], need_weights=False)[0]
        weighed, weights = self.weighing(x, x, x, attn_mask=mask)
        y = y + weighed + weights.sum(-1, keepdim=True)
        t = x.transpose(0, 1)
        return y + self.longer(t, t, t, need_weights=False)[0].transpose(0, 1)


class Translator(nn.Module):
    """The layers that torch brings: an encoder of two and a decoder of one, pre-norm and post-norm."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, HIDDEN, dropout=0.1, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, self.encoder(x))


class Own(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2, self.bias).tanh()


class Odd(nn.Module):
    """Linears whose product is not that of their input and their weight as they stand."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Own(WIDTH, WIDTH)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, HIDDEN))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(HIDDEN, WIDTH, bias=False))
        self.low = LowRank(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.low(self.spectral(self.normed(self.own(x))))


class LowRank(nn.Module):
    """Low-rank adaptation of a frozen Linear."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def gpt2() -> nn.Module:
    """GPT-2 as transformers builds it: its products are those of Conv1D."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def adapted() -> nn.Module:
    """The decoder with PEFT's adapters on q and v of every layer, everything else frozen."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(Decoder(), LoraConfig(target_modules=["q", "v"], r=2, lora_dropout=0.1))


class Quantised(nn.Module):
    """Frozen linears of bitsandbytes, of four bits (its scales quantised, too) and of eight."""

    def __init__(self) -> None:
        super().__init__()
        from bitsandbytes.nn import Linear4bit, Linear8bitLt

        self.inlet = nn.Linear(WIDTH, QUANTISED)
        self.four = Linear4bit(QUANTISED, QUANTISED, quant_type="nf4", compress_statistics=True)
        self.eight = Linear8bitLt(QUANTISED, WIDTH, has_fp16_weights=False)
        for frozen in (self.four, self.eight):
            frozen.requires_grad_(False)
        self.to("cpu")  # quantises

    def forward(self, x: Tensor) -> Tensor:
        return self.eight(F.relu(self.four(self.inlet(x))))
