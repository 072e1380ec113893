"""The whole plan of a job, from the documents of all ranks. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from capd_client.planning.figures import rank_plan
from capd_client.planning.nodes import node_plan, warnings_of
from capd_client.planning.seen import RankSeen

__all__ = ["whole_plan"]


def whole_plan(
    seen: Sequence[RankSeen], *, host: str, disk: Optional[Mapping[str, Any]], ended: bool
) -> dict[str, Any]:
    """Return the plan as docs/json.md describes it: `ranks`, `nodes`, `warnings` and `world_size`.

    Args:
        seen: The documents.
        host: The name of this node.
        disk: The `disk_plan` of this node, if known.
        ended: Whether the job ended by itself, without an error.
    """
    ranks = [rank_plan(one, ended=ended) for one in sorted(seen, key=lambda one: one.rank)]
    nodes = [
        node_plan([rank for rank in ranks if rank["host"] == name], disk if name == host else None)
        for name in dict.fromkeys(rank["host"] for rank in ranks)
    ]
    return {
        "world_size": max((one.world_size for one in seen), default=0),
        "ranks": ranks,
        "nodes": nodes,
        "warnings": warnings_of(ranks, nodes),
    }
