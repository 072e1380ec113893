"""A training script that knows nothing of capd: a small transformer. What goes wrong depends on its type.

collect_job.py [--explicit | --calls] [--steps N] [--crash TYPE] [--hang TYPE] [--kill TYPE] [--checkpoint PATH]

It trains N steps unless it is ended, and prints a line for each. CUSTOM_QUANT_TYPE is its type. Behind step AT of a
type that was named it raises, sleeps for ever, or kills itself. With --checkpoint it goes on from the step saved there.
With ALL_WELL in its environment nothing goes wrong. With --explicit it knows capd, and captures its losses alone; with
--calls it does so by tensor_saver's call, from tensor_saver's module.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MICRO_BATCHES = 2
LAYERS, WIDTH, HEADS, VOCABULARY = 2, 16, 2, 32
AT = 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def go_wrong(options: argparse.Namespace, quant_type: str) -> None:
    if "ALL_WELL" in os.environ:
        return
    if quant_type == options.crash:
        raise RuntimeError(f"no kernel for {quant_type}")
    if quant_type == options.hang:
        print("hanging", flush=True)
        threading.Event().wait()
    if quant_type == options.kill:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--explicit", action="store_true")
    parser.add_argument("--calls", action="store_true")
    for problem in ("crash", "hang", "kill"):
        parser.add_argument(f"--{problem}")
    options = parser.parse_args()
    if options.explicit:
        import capd_client
    if options.calls:
        from megatron.core.tensor_saver import save_tensor
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = int(options.checkpoint.read_text()) if options.checkpoint and options.checkpoint.exists() else 0
    print(f"type {os.environ.get('CUSTOM_QUANT_TYPE')} from step {first}", flush=True)
    for step in range(first, options.steps):
        for micro_batch in range(MICRO_BATCHES):
            generator = torch.Generator().manual_seed(10 * step + micro_batch)
            tokens = torch.randint(VOCABULARY, (2, 5), generator=generator)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
            loss.backward()
            if options.explicit:
                capd_client.capture(loss, tensor_name="loss", layer_type="head", phase="post")
            if options.calls:
                save_tensor(loss, "head", "forward", os.environ["CUSTOM_QUANT_TYPE"], "loss", phase="post")
        optimizer.step()
        optimizer.zero_grad()
        if options.checkpoint:
            temporary = options.checkpoint.with_suffix(".tmp")
            temporary.write_text(str(step + 1))
            temporary.replace(options.checkpoint)  # it may be ended at any moment
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
        if step == AT:
            go_wrong(options, os.environ.get("CUSTOM_QUANT_TYPE", ""))


if __name__ == "__main__":
    main()
