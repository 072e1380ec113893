"""A rank that trains with DeepSpeed and knows nothing of capd: its engine is found by `capd run`.

python found_deepspeed_job.py FILE STAGE
"""

from __future__ import annotations

import sys

import deepspeed
import torch
from torch import Tensor, nn
from torch import distributed as dist

WIDTH, ROWS, STEPS, MICRO_BATCHES = 8, 2, 2, 3


def batch(step: int, micro_batch: int, rank: int) -> Tensor:
    seed = 100 * step + 10 * micro_batch + rank
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def main(stage: int) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            engine.backward(engine(batch(step, micro_batch, dist.get_rank())).square().mean())
            engine.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[2]))
