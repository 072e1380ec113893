"""Runs with scalars, written as the daemon does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from capd_client.protocol.key import Moment
from capd_client.protocol.scalars import scalar_key
from tests.kit.store.cli import StoreWriter, bf16_bits, linear_key

__all__ = ["damage_scalar", "put_scalar", "write_scalars"]


def put_scalar(
    writer: StoreWriter, run_id: str, name: str, rank: int, value: float, iteration: int, **moment: int
) -> None:
    """Commit one scalar."""
    at = Moment(iteration=iteration, **{"time_ns": 1_000 + iteration, **moment})
    writer.put(run_id, scalar_key(name, rank), np.float64(value).reshape(()), "float64", at)


def write_scalars(root: Path, run_id: str, losses: Sequence[Sequence[float]], rates: Sequence[float]) -> Path:
    """A run with a loss of each rank and a rate of rank 0, beside a tensor in every iteration."""
    writer = StoreWriter(root)
    for rank, values in enumerate(losses):
        for iteration, value in enumerate(values):
            put_scalar(writer, run_id, "loss", rank, value, iteration)
            bits = bf16_bits(np.full((4, 32), 1.0 + iteration))
            writer.put(
                run_id,
                linear_key(rank=rank),
                bits,
                "bfloat16",
                Moment(iteration=iteration, time_ns=1_000 + iteration),
            )
    for iteration, value in enumerate(rates):
        put_scalar(writer, run_id, "rate", 0, value, iteration)
    writer.close()
    return root / f"{run_id}.zarr"


def damage_scalar(run: Path, name: str, rank: int = 0) -> None:
    """Destroy the values of a sealed scalar."""
    [shard] = [path for path in run.glob(f"scalar/rank{rank}/**/*{name}/data/c/**/*") if path.is_file()]
    content = bytearray(shard.read_bytes())
    content[64:] = bytes(byte ^ 0xFF for byte in content[64:])
    shard.write_bytes(content)
