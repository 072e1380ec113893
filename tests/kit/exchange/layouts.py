"""The same tensors of one rank, and of several ranks in the layouts that sglang's comparator has words for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capd_client.protocol.key import Moment
from tests.kit.store.cli import StoreWriter, linear_key

__all__ = ["JOINED", "UNRELATED", "laid_out_run", "whole_run"]

JOINED = ("input.zigzag", "input.ordered", "weight.fsdp", "weight.copied", "weight.stage")
"""The tensors whose parts have places."""
UNRELATED = "weight.unplaced"
"""The tensor of which nothing says how its parts belong together."""
_WEIGHT = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
_INPUT = np.random.default_rng(1).standard_normal((16, 4)).astype(np.float32)


def whole_run(root: Path) -> Path:
    """Write a run of one rank."""
    writer = StoreWriter(root)
    for name in (*JOINED, UNRELATED):
        _put(writer, 0, name, _INPUT if name.startswith("input") else _WEIGHT)
    return writer.close() / "exp.zarr"


def laid_out_run(root: Path) -> Path:
    """Write a run of several ranks: zigzag sequences, FSDP over tensor parallelism, replicas, stages of a pipeline."""
    writer = StoreWriter(root)
    for rank in (0, 1):
        zigzag = np.concatenate([np.split(_INPUT, 4)[at] for at in (rank, 3 - rank)])
        cp, dp = {"cp_rank": rank, "cp_size": 2}, {"dp_rank": rank, "dp_size": 2}
        tp = {"tp_rank": rank, "tp_size": 2}
        _put(writer, rank, "input.zigzag", zigzag, **cp, cp_placement="Z(0)")
        _put(writer, rank, "input.ordered", zigzag, **cp, cp_placement="S(0)", cp_order="zigzag")
        _put(writer, rank, "weight.copied", _WEIGHT, **dp, dp_placement="R")
        _put(writer, rank, UNRELATED, np.split(_WEIGHT, 2)[rank], **tp)
    for rank in range(4):
        # The rank's rows are a part of the half that tensor parallelism left to it.
        part = np.split(_WEIGHT, 4)[2 * (rank % 2) + rank // 2]
        place = {"dp_rank": rank // 2, "dp_size": 2, "tp_rank": rank % 2, "tp_size": 2}
        placements = {"dp_placement": "S(0)", "tp_placement": "S(0)", "mesh": ["tp", "dp"]}
        _put(writer, rank, "weight.fsdp", part, **place, **placements)
    _put(writer, 0, "weight.stage", _WEIGHT, pp_rank=0, pp_size=2, vpp_rank=0, vpp_size=2)
    return writer.close() / "exp.zarr"


def _put(writer: StoreWriter, rank: int, name: str, array: NDArray[np.float32], **attributes: Any) -> None:
    key = linear_key(rank=rank, tensor_name=name)
    writer.put("exp", key, array, "float32", Moment(time_ns=1 + rank), attributes=attributes)
