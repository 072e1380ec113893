"""A rank that trains a small model as far as it is told, and writes a hash of all that it captures to a file.

    told_job.py FILE BAD_STEP BAD_RANK

At BAD_STEP the rank BAD_RANK has a NaN in its input. With MASTER_PORT the gradients of the ranks are added up (gloo).
Commands on standard input, each with an answer but those that end the process: `to STEP` trains up to and with a step
and flushes, `on` trains in a thread until the end, `step` says how far it is, `keep REASON`, `keeps` (keep at each
later step), `counters`, `exit`, `kill`, `raise`, `leave`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import capd_client

RANK = int(os.environ["RANK"])


class Written:
    """What the hooks of the job itself saw, one JSON line for each tensor. A killed process leaves whole lines."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self.iteration = 0

    def add(self, module: str, operation: str, tensor_name: str, tensor: Tensor) -> None:
        elements = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        row = [self.iteration, module, operation, tensor_name, hashlib.sha256(elements).hexdigest()]
        os.write(self._file, json.dumps(row).encode() + b"\n")

    def watch(self, model: nn.Module) -> None:
        """Write X, W, Y, dY, dX of each Linear."""
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                self._watch(name, module)

    def _watch(self, name: str, module: nn.Linear) -> None:
        def forward(_: nn.Module, x: tuple[Tensor, ...], y: Tensor) -> None:
            for tensor_name, tensor in (("input", x[0]), ("weight", module.weight), ("output", y)):
                self.add(name, "forward", tensor_name, tensor)

        def backward(_: nn.Module, dx: tuple[Tensor | None, ...], dy: tuple[Tensor, ...]) -> None:
            self.add(name, "backward", "grad_output", dy[0])
            if dx[0] is not None:
                self.add(name, "backward", "grad_input", dx[0])

        module.register_forward_hook(forward)
        module.register_full_backward_hook(backward)


class Job:
    """The training."""

    def __init__(self, written: str, bad_step: str, bad_rank: str) -> None:
        self._bad = int(bad_step), int(bad_rank)
        self._is_joint = "MASTER_PORT" in os.environ
        if self._is_joint:
            dist.init_process_group("gloo")
        torch.manual_seed(RANK)
        self.step = 0
        self.keeps = False
        self._written = Written(written)
        self._model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.001)
        self._written.watch(self._model)
        capd_client.watch(
            self._model, steps="all", tensors=("input", "weight", "output", "grad_output", "grad_input")
        )

    def train(self) -> None:
        """Train one step."""
        self._written.iteration = self.step
        values = torch.randn(4, 8)
        if (self.step, RANK) == self._bad:
            values[1, 2] = torch.nan
        # So that the first layer has a dX, too.
        loss = self._model(values.requires_grad_()).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        for parameter in self._model.parameters():
            assert parameter.grad is not None
            # The NaN of one rank must not reach the other one.
            parameter.grad.nan_to_num_(0.0)
            if self._is_joint:
                dist.all_reduce(parameter.grad)
        self._optimizer.step()
        if self.keeps:
            capd_client.keep(f"storm at {self.step}")
        self.step += 1

    def train_on(self, stop: threading.Event) -> None:
        while not stop.wait(0.002):
            self.train()


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    job = Job(*sys.argv[1:])
    stop = threading.Event()
    training: threading.Thread | None = None
    answer("ready")
    for line in sys.stdin:
        verb, _, word = line.strip().partition(" ")
        if verb == "to":
            while job.step <= int(word):
                job.train()
            answer(capd_client.flush(30))
        elif verb == "on":
            training = threading.Thread(target=job.train_on, args=(stop,))
            training.start()
            answer("on")
        elif verb == "step":
            answer(job.step)
        elif verb == "keep":
            capd_client.keep(word)
            answer("asked")
        elif verb == "keeps":
            job.keeps = True
            answer("asked")
        elif verb == "counters":
            answer(capd_client.counters())
        elif verb == "exit":
            os._exit(3)
        elif verb == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif verb == "raise":
            raise FloatingPointError("the loss is not a number")
        elif verb == "leave":
            break
    stop.set()
    if training is not None:
        training.join()
    capd_client.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
