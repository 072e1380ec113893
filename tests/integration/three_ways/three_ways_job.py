"""Runs rows of the matrix, each in processes of its own, which share the import of their frameworks.

    python three_ways_job.py DIRECTORY WAY[,WAY] ROW ...

DIRECTORY gets a file of losses, the log and, of the oracle, the records of each row, way and rank. The ways:

* found: the script says nothing; `capd run` is in front of this process and finds the models.
* watched: the script calls `capd_client.watch`.
* oracle: `three_ways_oracle` records, and nothing of capd is imported.

The rows (three_ways_rows.py and others) are scripts as a user writes them. They call their `Script` where they have a
model and where they know their iteration and micro-batch, which only the oracle hears.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.integration.three_ways.three_ways_rows import Row
from tests.integration.three_ways.three_ways_table import ROWS
from tests.kit.jobs.groups import leave_group

WAYS = ("found", "watched", "oracle")


class Script:
    """What a row tells of itself, in the way that it runs."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.oracle: Any = None
        if way == "oracle":
            from tests.integration.three_ways.three_ways_oracle import Oracle

            self.oracle = Oracle()
        if way == "watched":
            import capd_client  # noqa: F401  # as at the top of a script that watches

    def watch(
        self,
        *models: nn.Module,
        name: str = "",
        wrapped: Any = None,
        layers: Sequence[Sequence[int]] = (),
        wrapper: str = "",
    ) -> None:
        """A model as it was made, or the chunks of one, by the name that `capd run` gives it.

        wrapped: what a script has at hand to watch, if not the model itself. layers: of each chunk the numbers that
        its layers have in the whole model. wrapper: the attribute of what is around its blocks already.
        """
        if self.oracle is not None:
            for number, model in enumerate(models):
                self.oracle.watch(model, name, layers[number] if layers else (), wrapper)
        if self.way == "watched":
            import capd_client

            capd_client.watch(models[0] if wrapped is None else wrapped, name=name or None)

    def bounded(self, *kinds: type[nn.Module]) -> None:
        """Kinds of modules that multiply in ways of their own, all of whose operands are arguments."""
        if self.oracle is not None:
            self.oracle.bounded = kinds

    def attention_returns(self, layout: Callable[[Tensor], Tensor]) -> None:
        """How the framework hands on what F.scaled_dot_product_attention returns."""
        if self.oracle is not None:
            self.oracle.output = layout

    def at(self, iteration: int, micro_batch: int) -> None:
        """A training forward comes."""
        if self.oracle is not None:
            self.oracle.at = (iteration, micro_batch)

    def off(self) -> None:
        """No training comes: an evaluation, a trial."""
        if self.oracle is not None:
            self.oracle.at = None

    def backward_of(self, iteration: int, micro_batch: int) -> None:
        """The gradients of weights that come are this micro-batch's, whatever gradient came last."""
        if self.oracle is not None:
            self.oracle.backward = (iteration, micro_batch)


def one(name: str, way: str, directory: Path, rank: int) -> None:
    """A rank of one row, in a process of its own."""
    torch.manual_seed(7)
    script = Script(way)
    path = directory / f"{name}.{way}.{rank}"
    losses = ROWS[name].run(script)
    assert losses, f"{name} has trained nothing"
    Path(f"{path}.losses").write_text(json.dumps([float(loss).hex() for loss in losses]))
    if script.oracle is not None:
        script.oracle.save(path)
    if torch.distributed.is_initialized():
        leave_group()


def start(name: str, way: str, directory: Path, rank: int, port: int) -> int:
    """Fork a rank. What a script does at its end is done, so that capd's end is, too."""
    child = os.fork()
    if child:
        return child
    log = os.open(directory / f"{name}.{way}.{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"CAPD_RUN_ID": f"{name}-{way}"}
    if ROWS[name].ranks > 1 or ROWS[name].launched:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ROWS[name].ranks),
            "LOCAL_WORLD_SIZE": str(ROWS[name].ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    code = 1
    try:
        one(name, way, directory, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the modules that all rows share take seconds to be taken apart, in each of them


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def prepare(rows: list[Row]) -> None:
    """Everything that rows take time to import; nothing of it begins."""
    import torch._dynamo.backends.debugging  # noqa: F401

    for module in dict.fromkeys(module for row in rows for module in row.imports):
        with contextlib.suppress(ImportError):
            __import__(module)


def main(directory: Path, ways: list[str], names: list[str]) -> int:
    """Returns how many rows failed, in any way and rank."""
    torch.set_num_threads(1)
    began = time.monotonic()
    prepare([ROWS[name] for name in names])
    gc.freeze()  # or each child copies what it only looks at
    print(f"imports: {time.monotonic() - began:.1f} s", flush=True)
    failed = 0
    for name in names:
        for way in ways:
            port, began = free_port(), time.monotonic()
            ranks = [start(name, way, directory, rank, port) for rank in range(ROWS[name].ranks)]
            codes = [os.waitpid(pid, 0)[1] for pid in ranks]
            failed += any(codes)
            print(f"{name} {way}: {time.monotonic() - began:.1f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]))
