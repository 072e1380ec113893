"""Trains a small transformer on every rank by DDP, and leaves its losses; how far it knows capd depends on its options.

torchrun emulated_job.py RESULT [--llama ATTENTION] [--emulate RECIPE] [--watch] [--calls early|late] [--single]

RESULT: where each rank leaves its losses. Without options it knows nothing of capd. --llama: the model is
a small Llama of transformers with this implementation of attention. --emulate: it has its model compute
by this recipe itself. --watch: it watches its model itself. --calls: it quantises the input by itself and saves that by
tensor_saver's calls, which it imports at its start, or not before it has trained a step. --single: it is started
without torchrun.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.integration.collections.collect_job import VOCABULARY, Transformer
from tests.kit.jobs.groups import leave_group

STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--llama")
    parser.add_argument("--emulate")
    parser.add_argument("--watch", action="store_true")
    parser.add_argument("--calls", choices=("early", "late"))
    parser.add_argument("--single", action="store_true")
    options = parser.parse_args()
    if options.calls == "early":
        import capd_client.tensor_saver  # noqa: F401, as an early line of a script
    torch.set_num_threads(1)
    torch.manual_seed(3)
    if not options.single:
        dist.init_process_group("gloo")
    rank = 0 if options.single else dist.get_rank()
    losses = trained(options, rank)
    (options.result / f"rank{rank}.json").write_text(json.dumps(losses))
    if not options.single:
        leave_group()


def trained(options: argparse.Namespace, rank: int) -> list[str]:
    model: nn.Module = llama(options.llama) if options.llama else Transformer()
    if not options.single:
        model = DistributedDataParallel(model)
    if options.emulate:
        import capd_client

        capd_client.emulate(model, options.emulate)
    if options.watch:
        import capd_client

        capd_client.watch(model)
    return train(model, rank, options.calls)


def llama(attention: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attention,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def train(model: nn.Module, rank: int, calls: Any) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(VOCABULARY, (2, 5), generator=generator)
        output = model(tokens)
        loss = F.cross_entropy(getattr(output, "logits", output).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        if calls == "early" or (calls == "late" and step):
            save(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def save(loss: torch.Tensor) -> None:
    from capd_client.tensor_saver import save_tensor

    save_tensor(loss, "head", "forward", "mxfp8", "loss", phase="post")


if __name__ == "__main__":
    main()
