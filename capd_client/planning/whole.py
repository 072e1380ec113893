"""The whole plan of a job, from the documents of all ranks: the plan of each rank and node, and warnings. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

from capd_client.planning.figures import rank_plan
from capd_client.planning.seen import RankSeen
from capd_client.process.text import human_nbytes
from capd_client.protocol.selection import Ranges

__all__ = ["whole_plan"]

_LESS = "fewer steps (--steps), rows (--slice), calls (--mode sample:1/N), tensors or modules"


def whole_plan(
    seen: Sequence[RankSeen],
    *,
    host: str,
    disk: Optional[Mapping[str, Any]],
    ended: bool,
    window: Optional[tuple[int, int]] = None,
) -> dict[str, Any]:
    """Return the plan as docs/json.md describes it: `ranks`, `nodes`, `warnings` and `world_size`.

    Args:
        seen: The documents.
        host: The name of this node.
        disk: The `disk_plan` of this node, if known.
        ended: Whether the job ended by itself, without an error.
        window: The iterations and the bytes that the flight recorder of this node may hold; None without one.
    """
    ranks = [rank_plan(one, ended=ended) for one in sorted(seen, key=lambda one: one.rank)]
    here = disk, window
    nodes = [
        _node_plan(
            [rank for rank in ranks if rank["host"] == name], *(here if name == host else (None, None))
        )
        for name in dict.fromkeys(rank["host"] for rank in ranks)
    ]
    return {
        "world_size": max((one.world_size for one in seen), default=0),
        "ranks": ranks,
        "nodes": nodes,
        "warnings": _warnings_of(ranks, nodes),
    }


def _node_plan(
    ranks: Sequence[Mapping[str, Any]],
    disk: Optional[Mapping[str, Any]],
    window: Optional[tuple[int, int]],
) -> dict[str, Any]:
    """Return the sums over the ranks of one host.

    Args:
        ranks: The plans of the ranks.
        disk: The `disk_plan` of the host; None if the host is not this node.
        window: The iterations and the bytes of its flight recorder; None without one, and if it is not this node.
    """
    sums = {name: sum(rank[name] for rank in ranks) for name in ("records", "bytes", "bytes_per_1000_steps")}
    per_hour = _sum(rank["bytes_per_hour"] for rank in ranks)
    in_all = _sum(rank["bytes_in_all"] for rank in ranks)
    room = None if disk is None else _room(disk)
    return {
        "host": ranks[0]["host"],
        "ranks": [rank["rank"] for rank in ranks],
        **sums,
        "arena_bytes": sum(rank["arena_bytes"] for rank in ranks),
        "bytes_in_all": in_all,
        "bytes_per_hour": per_hour,
        "disk": disk,
        "room_bytes": room,
        "hours_until_full": room / per_hour if room is not None and per_hour else None,
        "window": None if window is None else _window_plan(ranks, *window),
    }


def _window_plan(ranks: Sequence[Mapping[str, Any]], iterations: int, limit: int) -> dict[str, Any]:
    """Return what the flight recorder of a node takes. It holds tensors raw, and no statistics."""
    step = sum(
        one["bytes"]
        for rank in ranks
        for one in rank["series"]
        if one["kept"] == "tensor" and not one["besides"]
    )
    needed = iterations * step
    return {
        "iterations": iterations,
        "step_bytes": step,
        "bytes": needed,
        "limit_bytes": limit,
        "fits": needed <= limit,
    }


def _room(disk: Mapping[str, Any]) -> int:
    """Return the bytes that a new run may take."""
    limits = [disk["max_disk"], max(0, disk["free_bytes"] - disk["keep_free"]), disk.get("run_max")]
    return int(min(limit for limit in limits if limit is not None))


def _warnings_of(ranks: Sequence[Mapping[str, Any]], nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the warnings, each with the setting to change. A warning that ranks share comes once."""
    found = [line for rank in ranks for line in _of_rank(rank)] + [
        line for node in nodes for line in _of_node(node)
    ]
    return list(dict.fromkeys(found))


def _of_rank(rank: Mapping[str, Any]) -> Iterator[str]:
    if rank["cut_short"]:
        yield rank["cut_short"]
    for text in rank["steps"]:
        if Ranges(text).first_from(rank["first_iteration"]) is None:
            yield (
                f'steps "{text}" are before the first iteration of the job, {rank["first_iteration"]}: none of them is '
                "captured. Select later steps (--steps)"
            )
    step_s, link_s, drop = rank["step_s"], rank["link_s"], rank["policy"] != "block"
    for reason, count in rank["refused"].items():
        yield f"rank {rank['rank']}: {count} captures of the planned steps cannot be taken ({reason}); its log says why"
    if step_s and link_s and link_s > step_s:
        yield (
            f"a captured step takes the link {link_s:.3g} s, and a step lasts {step_s:.3g} s: captured steps get slower"
            f", or lose captures. Select {_LESS}"
        )
    if drop and rank["largest_bytes"] > rank["arena_bytes"]:
        yield (
            f"the largest tensor, {human_nbytes(rank['largest_bytes'])}, does not fit into the arena of "
            f"{human_nbytes(rank['arena_bytes'])}: raise CAPD_ARENA_BYTES, or set CAPD_POLICY=block (in parts)"
        )
    if drop and rank["link_bytes"] > rank["arena_bytes"]:
        yield (
            f"a captured step of a rank, {human_nbytes(rank['link_bytes'])}, is more than its arena, "
            f"{human_nbytes(rank['arena_bytes'])}: unless the daemon keeps up within the step, captures are lost. "
            "Raise CAPD_ARENA_BYTES, or set CAPD_POLICY=block, which waits"
        )
    if rank["max_step_bytes"] is not None and rank["link_bytes"] > rank["max_step_bytes"]:
        yield (
            f"a captured step of a rank, {human_nbytes(rank['link_bytes'])}, is more than max_mb_per_step, "
            f"{human_nbytes(rank['max_step_bytes'])}: the rest is dropped (step_budget). Raise "
            "CAPD_MAX_MB_PER_STEP, or select less"
        )


def _of_node(node: Mapping[str, Any]) -> Iterator[str]:
    disk, room, in_all, window = node["disk"], node["room_bytes"], node["bytes_in_all"], node["window"]
    if window is not None and not window["fits"]:
        newest = int(window["limit_bytes"] // window["step_bytes"])
        yield (
            f"{window['iterations']} iterations of {node['host']} take {human_nbytes(window['bytes'])}, and [window] "
            f"bytes is {human_nbytes(window['limit_bytes'])}: only the newest {newest} are held. Raise bytes, lower "
            f"iterations, or select {_LESS}"
        )
    if disk is None:
        return
    speed, per_hour = disk.get("write_bytes_per_s"), node["bytes_per_hour"]
    if speed and per_hour and per_hour / 3600 > speed:
        yield (
            f"{human_nbytes(per_hour / 3600)} per second are captured on {node['host']}, and its disk writes "
            f"{human_nbytes(speed)}: the arenas fill up, then captures are lost, or steps wait. Select {_LESS}; "
            "or a --store on a faster disk"
        )
    if room is not None and (in_all or node["bytes"]) > room:
        amount = "the selection takes" if in_all else "one captured step takes"
        limit = "CAPD_MAX_DISK" if disk["max_disk"] == room else "CAPD_KEEP_FREE, or make room"
        rest = "the rest is dropped (disk_full)"
        if disk.get("run_max") == room:
            limit, rest = (
                "CAPD_RUN_MAX",
                "the rest is kept as statistics or dropped (quota), as policy in [quota] says",
            )
        yield (
            f"{amount} {human_nbytes(in_all or node['bytes'])} (raw), and {human_nbytes(room)} may be written to "
            f"{disk['store']}: {rest}. Change {limit}"
        )


def _sum(values: Iterator[Optional[float]]) -> Optional[float]:
    """Return the sum, or None if any value is None."""
    found = list(values)
    return (
        None if any(value is None for value in found) else sum(value for value in found if value is not None)
    )
