"""A small training loop that captures as its environment says, and keeps what plain hooks saw.

    python modes_job.py OUT ITERATIONS MICRO_BATCHES

OUT gets the losses, the state of the random generator, and every operand by (module, tensor, iteration, micro-batch).
JOB_SLICES: what `watch` gets as its slices, in JSON. JOB_PAUSES=1: connect first, and wait for a line on standard input
before and after the training.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

import capd_client

Operands = dict[tuple[str, str, int, int], Tensor]


def keep_operands(name: str, module: nn.Linear, operands: Operands, at: list[int]) -> None:
    """Copy X, W, Y and dY of every call; `at` is the iteration and micro-batch of the forward."""

    def after(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        moment = (at[0], at[1])
        for tensor_name, tensor in (("input", args[0]), ("weight", module.weight), ("output", output)):
            operands[(name, tensor_name, *moment)] = tensor.detach().clone()

        def gradient(value: Tensor) -> None:
            operands[(name, "grad_output", *moment)] = value.detach().clone()

        output.register_hook(gradient)

    module.register_forward_hook(after)


def pause(what: str) -> None:
    if os.environ.get("JOB_PAUSES"):
        print(what, flush=True)
        sys.stdin.readline()


def main() -> None:
    out, iterations, micro_batches = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    operands: Operands = {}
    at = [0, 0]
    for name in ("0", "3"):
        keep_operands(name, model.get_submodule(name), operands, at)
    slices = os.environ.get("JOB_SLICES")
    capd_client.watch(model, steps="all", slices=None if slices is None else json.loads(slices))
    if os.environ.get("JOB_PAUSES"):
        capd_client.capture(torch.zeros(1), tensor_name="connected")
        assert capd_client.flush(30)
    pause("connected")
    losses = []
    for iteration in range(iterations):
        for micro_batch in range(micro_batches):
            at[:] = iteration, micro_batch
            loss = model(torch.randn(4, 6, 12)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    pause("trained")
    assert capd_client.flush(30)
    torch.save(
        {
            "losses": losses,
            "random": torch.get_rng_state(),
            "operands": operands,
            "counters": capd_client.counters(),
        },
        out,
    )
    capd_client.close()


if __name__ == "__main__":
    main()
