"""Which rank this process is: torch.distributed where it is initialised, else the launcher's environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["RankInfo", "distributed_ready", "find_rank"]

_MAX_RANK = 2**31 - 1
_world: Any = None  # torch's class that holds the default process group, once it is loaded


@dataclass(frozen=True)
class RankInfo:
    """A process's place in the job. `source` says where the rank came from."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    attempt: int = 0
    source: str = "default"


def distributed_ready() -> bool:
    """Whether torch.distributed has a default process group. Imports nothing; asked at every capture."""
    group = _world or _find_world()
    return group is not None and group.WORLD is not None


def _find_world() -> Any:
    global _world
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    _world = None if c10d is None else c10d.GroupMember
    return _world


def find_rank(environ: Mapping[str, str] | None = None) -> RankInfo:
    """torch.distributed > RANK / LOCAL_RANK > 0.

    LOCAL_RANK is the rank of a job known to stay on one node; where it spans nodes (WORLD_SIZE above
    LOCAL_WORLD_SIZE), or may, only RANK tells ranks apart. Values that are no numbers count as absent.
    """
    environ = os.environ if environ is None else environ
    rank, local_rank = _number(environ, "RANK"), _number(environ, "LOCAL_RANK")
    world = _number(environ, "WORLD_SIZE")
    local_world = _number(environ, "LOCAL_WORLD_SIZE")
    attempt = _number(environ, "TORCHELASTIC_RESTART_COUNT") or 0
    one_node = world is not None and local_world is not None and world <= local_world
    order = (
        (("LOCAL_RANK", local_rank), ("RANK", rank))
        if one_node
        else (("RANK", rank), ("LOCAL_RANK", local_rank))
    )
    source, number = next(((f"env {name}", n) for name, n in order if n is not None), ("default", 0))
    if distributed_ready():
        from torch import distributed

        source, number, world = "torch.distributed", distributed.get_rank(), distributed.get_world_size()
    return RankInfo(
        rank=number,
        world_size=max(1, world or 1),
        local_rank=local_rank if local_rank is not None else 0,
        local_world_size=max(1, local_world or (world or 1) if local_rank is not None else 1),
        attempt=attempt,
        source=source,
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and int(text) <= _MAX_RANK else None
