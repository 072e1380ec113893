"""A job of several ranks that knows nothing of capd: it accumulates gradients, and evaluates between its steps.

collect_ranks_job.py ddp | embedding | calls [STEPS]

ddp: each rank trains the same small model on its own data, MICRO_BATCHES of it per step; in front of every step and
behind it the model is evaluated. embedding: rank 1 trains an embedding alone, in which capd captures nothing.
calls: rank 0 alone captures its loss, by tensor_saver's call. It trains STEPS steps, or until it is ended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

MICRO_BATCHES = 3
WIDTH, VOCABULARY = 16, 32
LINEARS = ("0", "2")  # of the model, by their names


def model_of(kind: str, rank: int) -> nn.Module:
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    if kind == "embedding" and rank:
        return embedding
    linears = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(linears)
    return linears


def inputs(kind: str, rank: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        if kind == "embedding" and rank:
            yield torch.randint(VOCABULARY, (4,), generator=generator)
        else:
            yield torch.randn(4, WIDTH, generator=generator)


def evaluate(model: nn.Module, x: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


def main() -> None:
    kind, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else sys.maxsize
    torch.set_num_threads(1)
    torch.manual_seed(3)
    dist.init_process_group("gloo")
    train(kind, steps, dist.get_rank())
    # The model is gone: a DDP model that outlives its group may wait for gloo for ever (tests/kit/jobs/groups.py).
    dist.destroy_process_group()


def train(kind: str, steps: int, rank: int) -> None:
    model = model_of(kind, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    given = inputs(kind, rank)
    if kind == "calls" and not rank:
        from megatron.core.tensor_saver import save_tensor
    for _ in range(steps):
        evaluate(model, next(given))
        for micro_batch in range(MICRO_BATCHES):
            loss = F.cross_entropy(model(next(given)).flatten(1), torch.arange(4)) / MICRO_BATCHES
            loss.backward()
            if kind == "calls" and not rank:
                save_tensor(loss, "head", "forward", "mxfp8", "loss", phase="post", sample_idx=micro_batch)
        optimizer.step()
        optimizer.zero_grad()
        evaluate(model, next(given))
        dist.barrier()


if __name__ == "__main__":
    main()
