"""The cost of emulation: a training step of a small transformer in each format, compared with the same step without.

    python benchmarks/emulation.py [--rounds N] [--quick] [--json FILE]

Each recipe has its own copy of the model. In every round each copy takes a step, in turn. The table has the median
milliseconds, and the median ratio of a round's step to its bare step.
"""

from __future__ import annotations

import copy
import statistics
import time

import torch
from torch import nn

import capd_client
from benchmarks.store.store_runner import options, report, table

RECIPES = ("none", "fp8", "mxfp8", "mxfp4", "nvfp4", "hifp8")


def main() -> None:
    args = options(__doc__, rounds=9).parse_args()
    # On busy cores, several threads would wait for each other.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    bare = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(torch.bfloat16)
    models = {"bare": bare, **{recipe: copy.deepcopy(bare) for recipe in RECIPES}}
    for recipe in RECIPES:
        capd_client.emulate(models[recipe], recipe)
    x = torch.randn(4, 8 if args.quick else 64, 256, dtype=torch.bfloat16)
    taken = [{name: step(model, x) for name, model in models.items()} for _ in range(args.rounds + 1)][1:]
    rows = [
        {
            "recipe": name,
            "ms": statistics.median(times[name] for times in taken) * 1e3,
            "of bare": statistics.median(times[name] / times["bare"] for times in taken),
        }
        for name in models
    ]
    table(list(rows[0]), [list(row.values()) for row in rows])
    report({"rounds": args.rounds, "rows": rows}, args.json)


def step(model: nn.Module, x: torch.Tensor) -> float:
    """Return the seconds of a forward and a backward."""
    start = time.perf_counter()
    model(x).square().mean().backward()
    model.zero_grad()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
