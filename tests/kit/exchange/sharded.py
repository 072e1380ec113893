"""A run of two tensor-parallel ranks with parts of known tensors, for the exchange with other tools."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from capd_client.protocol.key import Moment
from tests.kit.store.cli import StoreWriter, linear_key

__all__ = ["ROWS", "sharded_run", "whole"]

ROWS, OUT, IN = 6, 8, 4


def whole(name: str, factor: float = 1.0) -> NDArray[np.float32]:
    """The whole tensor that the ranks hold parts of."""
    shape = {"weight": (OUT, IN), "input": (ROWS, IN), "output": (ROWS, OUT), "grad_input": (ROWS, IN)}[name]
    return np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32) * np.float32(factor)


def sharded_run(root: Path, run_id: str, factor: float = 1.0) -> Path:
    """Write the run: a weight split by rows, a whole input, an output split by columns, and partial sums."""
    writer = StoreWriter(root)
    for rank in (0, 1):
        partial = whole("grad_input") * np.float32(0.25 if rank == 0 else 0.75)
        parts = {
            "weight": ("S(0)", whole("weight", factor)[rank * 4 : rank * 4 + 4]),
            "input": ("R", whole("input")),
            "output": ("S(-1)", whole("output")[:, rank * 4 : rank * 4 + 4]),
            "grad_input": ("P(sum)", partial),
        }
        for name, (placement, part) in parts.items():
            operation = "backward" if name.startswith("grad") else "forward"
            key = linear_key(rank=rank, tensor_name=name, operation=operation)
            attributes = {"tp_rank": rank, "tp_size": 2, "tp_placement": placement, "mesh": ["tp"]}
            moment = Moment(iteration=3, micro_batch=1, time_ns=10 + rank)
            writer.put(run_id, key, part, "float32", moment, attributes=attributes, metadata=b'{"note": 1}')
    return writer.close() / f"{run_id}.zarr"
