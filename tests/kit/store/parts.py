"""Runs whose records are parts of whole tensors, with attributes as a job would have given them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from capd_client.protocol.key import Key, Moment
from tests.kit.store.cli import StoreWriter, session_row

__all__ = ["linear", "placed", "put_parts"]


def linear(tensor_name: str = "output", rank: int = 0, **changes: Any) -> Key:
    """The key of a tensor of a linear."""
    values: dict[str, Any] = {
        "quant_type": "fp32", "tensor_name": tensor_name, "layer": 0, "layer_type": "linear", "component": "linear",
        "module": "layers.0.fc1", "stack": "layers",
    }  # fmt: skip
    return Key(rank=rank, **{**values, **changes})


def placed(dimension: str, placement: str, rank: int, size: int, **more: Any) -> dict[str, Any]:
    """Attributes of a part over one dimension."""
    return {
        f"{dimension}_placement": placement,
        f"{dimension}_rank": rank,
        f"{dimension}_size": size,
        **more,
    }


def put_parts(
    root: Path,
    parts: list[tuple[Key, np.ndarray[Any, Any], dict[str, Any]]],
    *,
    node: str = "node0",
    sessions: dict[int, int] | None = None,
    **moment: int,
) -> Path:
    """Write one record for each part into the run `run`; returns it. sessions: ranks, with the ranks of their job."""
    writer = StoreWriter(root, node)
    for key, array, attributes in parts:
        dtype = {"uint16": "bfloat16"}.get(array.dtype.name, array.dtype.name)
        writer.put("run", key, array, dtype, Moment(**moment), attributes=attributes)
    for rank, world in (sessions or {}).items():
        row = session_row(rank=rank, world_size=world, client=bytes([rank]) * 16, host=node)
        writer.save_session("run", row)
    return writer.close() / "run.zarr"
