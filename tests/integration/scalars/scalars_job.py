"""Records scalars in a loop of two kinds, and says on stdout what has been recorded.

scalars_job.py train   two ranks: a loop with a clipped gradient, to its end
scalars_job.py count   numbers without end; each is printed after `scalar()` has returned
scalars_job.py keep    a hundred numbers, flushed; then it waits for its end
"""

from __future__ import annotations

import itertools
import sys
import time

import torch
from torch import nn

import capd_client


def train() -> None:
    import os

    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    capd_client.watch(model, steps="0-2")
    for step in range(6):
        for micro_batch in range(2):
            loss = (model(torch.randn(8, 4)) ** 2).mean()
            capd_client.scalar("micro", loss)
            loss.backward()
            print("micro", step, micro_batch, loss.item().hex(), flush=True)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        print("grad_norm", step, 1, norm.item().hex(), flush=True)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            capd_client.scalar("rate", 0.01 / 3)
            print("rate", step, 1, (0.01 / 3).hex(), flush=True)
    assert capd_client.flush(60)
    capd_client.close()


def count() -> None:
    for number in itertools.count():
        capd_client.scalar("number", number / 3, iteration=number)
        print(number, flush=True)
        # The pace of the job, for which nothing waits. A scalar never waits either: at full speed some find no room.
        time.sleep(0.0005)


def keep() -> None:
    for number in range(100):
        capd_client.scalar("number", number / 3, iteration=number)
    assert capd_client.flush(60)
    print("flushed", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    {"train": train, "count": count, "keep": keep}[sys.argv[1]]()
