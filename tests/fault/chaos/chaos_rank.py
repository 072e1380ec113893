"""A rank of the chaos runner: trains a small model for ever, captures at every step, and writes down what it did.

    python chaos_rank.py LOG STOP        trains until the file STOP exists, then leaves in order
    python chaos_rank.py reference       prints the losses of one epoch of every rank; capture is off

The log lies outside of the store, and every line is with the kernel before the next statement runs: `offer` comes
before the capture, `ack` from the acknowledgement itself before the queue hear of it, `step` with the loss as hex
digits. Every epoch begins with the same weights and seeds: a step's loss depends on rank and step in the epoch
alone, random numbers included, so that any process can check it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import torch

import capd_client.api
from capd_client.inflight.queue import Queue
from tests.fault.kit.journals import digest
from tests.fault.kit.plain_rows import row_digest, row_of

STEPS = 60  # of an epoch
RANKS = 4
ATTEMPT = 10_000_000  # capture n of attempt a has the number a * ATTEMPT + n
_PACE_S = 0.02  # the disk of the machine shall last for a quarter of an hour


class Log:
    """JSON lines, one write each."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def line(self, operation: str, **values: object) -> None:
        os.write(self._fd, json.dumps({"op": operation, **values}).encode() + b"\n")


class Recorder:
    """Captures tensors and logs each before it is offered and when it is acknowledged."""

    def __init__(self, log: Log, rank: int, attempt: int) -> None:
        self._log, self._rank = log, rank
        self._next = attempt * ATTEMPT
        self._waiting: dict[int, int] = {}  # sequence → number
        self._session = capd_client.api.session()
        self._keeps_rows = "stats" in (os.environ.get("CAPD_MODE"), os.environ.get("CAPD_POLICY"))
        if self._session is not None:
            log.line("client", rank=rank, attempt=attempt, client=self._session.client.hex)
            _listen(self._session.queue, self._acknowledged)

    def capture(self, name: str, tensor: torch.Tensor, stride: int = 1) -> None:
        """Capture `tensor`, or every `stride`th row of it, and spoil it right after."""
        if self._session is None:
            return
        number, self._next = self._next, self._next + 1
        kept = tensor[::stride].contiguous()
        shape, words = tuple(kept.shape), {}
        if self._keeps_rows:
            words["row"] = row_digest(shape, row_of(kept.float().numpy()))
        payload = kept.view(-1).view(torch.uint8).numpy().tobytes()
        self._log.line("offer", rank=self._rank, id=number, name=name, hash=digest(shape, payload), **words)
        self._waiting[self._session.queue.last_sequence + 1] = number
        take = None if stride == 1 else f"stride:{stride}"
        capd_client.capture(tensor, tensor_name=name, iteration=number, slice=take)
        tensor.zero_()

    def _acknowledged(self, ranges: list[tuple[int, int]]) -> None:
        for first, last in ranges:
            for sequence in range(first, last + 1):
                if (number := self._waiting.pop(self._record_of(sequence), None)) is not None:
                    self._log.line("ack", rank=self._rank, id=number)

    def _record_of(self, sequence: int) -> int:
        """The sequence of the record that an acknowledgement is of: that of the last part is the record's."""
        queue = self._session.queue
        piece = queue.parts.live.get(sequence)
        return piece.record.descriptor.sequence if piece and piece.descriptor.ends_record else sequence


def _listen(queue: Queue, heard) -> None:  # type: ignore[no-untyped-def]
    settle = queue.acknowledged

    def acknowledged(ranges) -> None:  # type: ignore[no-untyped-def]
        taken = list(ranges)
        heard(taken)
        settle(taken)

    queue.acknowledged = acknowledged  # type: ignore[method-assign]


def train(rank: int, recorder: Recorder | None):  # type: ignore[no-untyped-def]
    """One epoch; gives (step, loss)."""
    torch.manual_seed(rank)
    random.seed(rank)
    model = torch.nn.Sequential(
        torch.nn.Linear(128, 128), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 16)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x = torch.randn(32, 128) * random.random()
        hidden = model[:3](x)
        if recorder is not None:
            _record(recorder, step, x, hidden)
        loss = (model[3](hidden) - x[:, :16]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step, float(loss.detach())


def _record(recorder: Recorder, step: int, x: torch.Tensor, hidden: torch.Tensor) -> None:
    """Small and large (in parts where the policy has them), one and several chunks, ragged, strided, cut and empty
    tensors; a gradient in the backward."""
    recorder.capture("small", x[:16].to(torch.bfloat16))
    recorder.capture("hidden", hidden.detach().clone())
    recorder.capture("strided", hidden.detach().clone().t()[:: 1 + step % 3])
    recorder.capture("rows", hidden.detach().clone(), stride=3)
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: recorder.capture("gradient", gradient.clone()))
    if step % 6 == 1:
        recorder.capture("ragged", x.repeat(step % 5, 8).to(torch.float16))
    if step % 20 == 3:
        recorder.capture("wide", x.repeat(8, 8 + step))
    if step == STEPS - 1:
        recorder.capture("large", x.repeat(32, 12))
        recorder.capture("large rows", x.repeat(64, 12).to(torch.bfloat16), stride=2)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] == "reference":
        print(json.dumps([[loss.hex() for _, loss in train(rank, None)] for rank in range(RANKS)]))
        return
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log, stop = Log(sys.argv[1]), Path(sys.argv[2])
    recorder = Recorder(log, rank, attempt)
    while not stop.exists():
        for step, loss in train(rank, recorder):
            log.line("step", step=step, loss=loss.hex(), at=time.monotonic())
            time.sleep(_PACE_S)
            if stop.exists():
                break
    flushed = capd_client.flush(timeout_s=60)
    log.line("end", flushed=flushed, counters=capd_client.counters())


if __name__ == "__main__":
    main()
