"""Finds the rank of this process: from torch.distributed if it is initialised, else the launcher's environment."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "RANK_VARIABLES", "REQUEUE_ATTEMPTS", "RankInfo", "distributed_ready", "find_rank", "index_in", "job_name",
    "node_job", "rank_in", "spans_nodes",
]  # fmt: skip

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""The variables that `rank_in` reads."""


REQUEUE_ATTEMPTS = 1000
"""The attempts that one requeue of a Slurm job counts for."""

_MAX_RANK = 2**31 - 1
_MAX_REQUEUES = 1_000_000
_C10D = "torch.distributed.distributed_c10d"
# All of torch's process groups, once torch.distributed is loaded.
_groups: Any = None


@dataclass(frozen=True)
class RankInfo:
    """A process's place in the job. `source` names the origin of the rank."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    attempt: int = 0
    source: str = "default"


def distributed_ready() -> bool:
    """Whether torch.distributed has a default process group. Imports nothing; asked at every capture."""
    groups = _groups if _groups is not None else _find_groups()
    # The dictionary is checked first, because the default group takes three properties, 90 ns.
    return bool(groups) and sys.modules[_C10D].GroupMember.WORLD is not None


def _find_groups() -> Any:
    global _groups
    c10d = sys.modules.get(_C10D)
    _groups = None if c10d is None else getattr(c10d, "_pg_map", True)
    return _groups


def find_rank(environ: Mapping[str, str] | None = None) -> RankInfo:
    """Find the rank: torch.distributed > RANK / LOCAL_RANK > 0. Values that are no numbers count as absent."""
    environ = os.environ if environ is None else environ
    local_rank, world = index_in(environ, "LOCAL_RANK"), index_in(environ, "WORLD_SIZE")
    local_world = index_in(environ, "LOCAL_WORLD_SIZE")
    number, source = rank_in(environ)
    if distributed_ready():
        from torch import distributed

        source, number, world = "torch.distributed", distributed.get_rank(), distributed.get_world_size()
    return RankInfo(
        rank=number or 0,
        world_size=max(1, world or 1),
        local_rank=local_rank if local_rank is not None else 0,
        local_world_size=max(1, local_world or (world or 1) if local_rank is not None else 1),
        attempt=_attempt(environ),
        source=source,
    )


def _attempt(environ: Mapping[str, str]) -> int:
    """Return the number of the job's restarts: those by a scheduler or a collection, then those by torchrun."""
    # A collection sets it for each new try.
    restarts = index_in(environ, "CAPD_ATTEMPT")
    if restarts is None:
        # A requeued job begins to count torchrun's restarts again, and must not reuse their numbers.
        restarts = (index_in(environ, "SLURM_RESTART_COUNT", _MAX_REQUEUES) or 0) * REQUEUE_ATTEMPTS
    return restarts + (index_in(environ, "TORCHELASTIC_RESTART_COUNT", _MAX_RANK - restarts) or 0)


def rank_in(environ: Mapping[str, str]) -> tuple[int | None, str]:
    """Return the rank in the launcher's variables, and its source; None and "default" if they have none.

    LOCAL_RANK is the rank of a job that is known to stay on one node. A job may span nodes if WORLD_SIZE is above
    LOCAL_WORLD_SIZE, or unknown; only RANK then identifies a rank.
    """
    world, local_world = index_in(environ, "WORLD_SIZE"), index_in(environ, "LOCAL_WORLD_SIZE")
    one_node = world is not None and local_world is not None and world <= local_world
    for name in ("LOCAL_RANK", "RANK") if one_node else ("RANK", "LOCAL_RANK"):
        number = index_in(environ, name)
        if number is not None:
            return number, f"env {name}"
    return None, "default"


def index_in(environ: Mapping[str, str], name: str, limit: int = _MAX_RANK) -> int | None:
    """Return the number from 0 to `limit` in a variable; None if it is absent or holds none."""
    text = environ.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(limit))):
        return None
    return int(text) if int(text) <= limit else None


def spans_nodes(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the launcher says that the job has ranks on other nodes, too."""
    environ = os.environ if environ is None else environ
    world, local = index_in(environ, "WORLD_SIZE"), index_in(environ, "LOCAL_WORLD_SIZE")
    return world is not None and local is not None and world > local


def job_name(environ: Mapping[str, str] | None = None) -> str | None:
    """Return a name for the job's run that all its ranks derive alike.

    On one node it comes from torchrun's agent, on several nodes from torchrun's id. The next job may reuse the id, and
    its default, "none", is shared by all jobs.

    Returns:
        The name; None outside torchrun, or on several nodes without an id.
    """
    environ = os.environ if environ is None else environ
    job = environ.get("TORCHELASTIC_RUN_ID", "")
    if not job:
        return None
    if spans_nodes(environ):
        return None if job == "none" else re.sub(r"[^A-Za-z0-9._-]", "-", job).lstrip(".-")[:128] or None
    return node_job()


def node_job() -> str | None:
    """Return a name that all ranks started by one process on this node derive alike; None without /proc."""
    agent = os.getppid()
    began = _began(agent)
    return None if began is None else f"job-{agent}-{began}"


def _began(pid: int) -> int | None:
    """Return the start time of a process in clock ticks of this boot, which every process reads alike."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
