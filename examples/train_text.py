"""Trains a small GPT on the sources of Python's standard library, with its tensors captured by capd.

    python examples/train_text.py                                             # one process, capture off
    capd run -- torchrun --nproc-per-node 2 examples/train_text.py            # two ranks, captured

The model is byte-level with causal attention. It trains under bf16 autocast with AdamW and gradient accumulation.
Under torchrun it uses DistributedDataParallel over gloo.

One line makes it a captured job: `capd_client.watch(model)` captures the operands of every Linear and of attention.
It does nothing when CAPD_ENDPOINT is unset. Losses are the same, bit for bit, with capture on and off.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

# plain_recorder.py is beside this file.
from plain_recorder import PlainRecorder
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import capd_client
from capd_client.protocol.selection import Ranges

# One token is one byte.
VOCABULARY = 256


class Attention(nn.Module):
    """Causal multi-head self-attention. Shapes: B batch, S sequence, H heads, D features per head."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.q = nn.Linear(d_model, d_model)
        self.k = nn.Linear(d_model, d_model)
        self.v = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q_BHSD, k_BHSD, v_BHSD = (self._split(linear(x)) for linear in (self.q, self.k, self.v))
        y_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, is_causal=True)
        return self.out(y_BHSD.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and inside a skip connection."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, heads)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """A GPT: tokens (batch, sequence) in, logits (batch, sequence, VOCABULARY) out."""

    def __init__(self, layers: int, d_model: int, heads: int, max_seq: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, d_model)
        self.positions = nn.Embedding(max_seq, d_model)
        self.layers = nn.ModuleList(Block(d_model, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(d_model)
        self.lm_head = nn.Linear(d_model, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def read_corpus(max_nbytes: int) -> Tensor:
    """Return the standard library's own .py files, in a fixed order, as bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if "site-packages" not in path.parts and "dist-packages" not in path.parts:
            text += path.read_bytes()
        if len(text) >= max_nbytes:
            break
    return torch.frombuffer(text[:max_nbytes], dtype=torch.uint8)


def draw_batch(corpus: Tensor, generator: torch.Generator, batch: int, seq: int) -> tuple[Tensor, Tensor]:
    """Return random windows of the corpus: inputs and, shifted by one byte, targets."""
    starts = torch.randint(len(corpus) - seq - 1, (batch,), generator=generator)
    windows = torch.stack([corpus[s : s + seq + 1] for s in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def train(args: argparse.Namespace, rank: int, world_size: int) -> list[float]:
    """Train for `args.steps` optimizer steps; returns this rank's loss of every micro-batch."""
    torch.manual_seed(args.seed)
    gpt = GPT(args.layers, args.d_model, args.heads, args.seq)
    model: nn.Module = DistributedDataParallel(gpt) if world_size > 1 else gpt
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    corpus = read_corpus(args.corpus_bytes)
    generator = torch.Generator().manual_seed(args.seed + 1 + rank)

    capd_client.watch(model, steps=args.capture_steps)
    reference = start_reference(gpt, args, rank)

    losses: list[float] = []
    for step in range(args.steps):
        started = time.perf_counter()
        for micro_batch in range(args.micro_batches):
            if reference is not None:
                reference.at(step, micro_batch)
            inputs, targets = draw_batch(corpus, generator, args.batch, args.seq)
            last = micro_batch == args.micro_batches - 1
            with contextlib.nullcontext() if last or world_size == 1 else model.no_sync():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    logits = model(inputs)
                    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
                (loss / args.micro_batches).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step:3d}  loss {losses[-1]:.4f}  {time.perf_counter() - started:.2f} s", flush=True)
    if reference is not None:
        reference.save()
    return losses


def start_reference(gpt: GPT, args: argparse.Namespace, rank: int) -> PlainRecorder | None:
    """Return a plain recorder of the same tensors for --dump-tensors, to compare a store with.

    None without the option.
    """
    if args.dump_tensors is None:
        return None
    return PlainRecorder(gpt, Ranges(args.capture_steps), args.dump_tensors / f"rank{rank}.pt")


def dump_losses(path: Path, losses: list[float], rank: int, world_size: int) -> None:
    """Write every rank's losses as hexadecimal floats, on rank 0. No digit is lost."""
    everyone = torch.zeros(world_size, len(losses), dtype=torch.float64)
    everyone[rank] = torch.tensor(losses, dtype=torch.float64)
    if world_size > 1:
        dist.all_reduce(everyone)
    if rank == 0:
        path.write_text(json.dumps([[float(x).hex() for x in row] for row in everyone]) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=2, help="sequences per micro-batch and rank")
    parser.add_argument("--seq", type=int, default=32, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=2, help="gradient accumulation")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--corpus-bytes", type=int, default=4 << 20)
    parser.add_argument(
        "--capture-steps", default=os.environ.get("CAPD_STEPS", "0-1"), help='as in "0-2,100-:100" or "all"'
    )
    parser.add_argument("--dump-losses", type=Path, metavar="FILE")
    parser.add_argument(
        "--dump-tensors", type=Path, metavar="DIR", help="also record the tensors without capd"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world_size > 1 else 0
    losses = train(args, rank, world_size)
    if args.dump_losses is not None:
        dump_losses(args.dump_losses, losses, rank, world_size)
    if world_size > 1:
        # gloo may abort a rank whose peer has already ended. A DDP model that outlives its group may wait for gloo for
        # ever: the model was freed when `train` returned.
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
