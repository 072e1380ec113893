"""The table of ranks that `capd ctl` prints: position, captures, and pending orders of each rank."""

from __future__ import annotations

from capd.cli.output import human_count
from capd.cli.table import Column, drawn
from capd.drops import lost
from capd.metrics import RankControl, Selected, Steer

__all__ = ["order_lines", "status_lines"]


def status_lines(ranks: list[RankControl], *, wide: bool = False) -> list[str]:
    """Return the run, the header and one row for each rank. `wide`: nothing has to fit the terminal."""
    columns = [
        Column("rank", [str(rank.rank) for rank in ranks], right=True),
        Column("attempt", [str(rank.attempt) for rank in ranks], right=True, spare=4),
        Column("host", [rank.host for rank in ranks], is_name=True, spare=3),
        Column("pid", [str(r.pid) if r.connected else f"{r.pid} (not connected)" for r in ranks], spare=5),
        Column("iteration", [_number(rank.iteration) for rank in ranks], right=True),
        Column("captures", [_what(rank.in_force) for rank in ranks], is_name=True),
        Column("since", [_number(rank.since) for rank in ranks], right=True, spare=2),
        Column("modules", [_number(rank.modules) for rank in ranks], right=True, spare=1),
        Column("pending", [_pending(rank) for rank in ranks], is_name=True),
        Column("in flight", [human_count(rank.in_flight) for rank in ranks], right=True),
        Column("dropped", [human_count(sum(lost(rank.dropped).values())) for rank in ranks], right=True),
    ]
    return [f"run {ranks[0].run_id}", *drawn(columns, wide=wide)[0]]


def order_lines(ranks: list[RankControl]) -> list[str]:
    """Return one line for each rank: the iteration from which it follows the order, or what it waits for."""
    return [f"rank {rank.rank}: {_order(rank)}" for rank in ranks]


def _order(rank: RankControl) -> str:
    if rank.problem:
        return f"cannot follow: {rank.problem}"
    if rank.pending is not None:
        return f"{_pending(rank)} (now {_at(rank)})"
    return f"{_what(rank.in_force)} from iteration {_number(rank.since)} on"


def _pending(rank: RankControl) -> str:
    if rank.pending is None:
        return "-"
    known = "" if rank.received else ", not received yet"
    return f"{_what(rank.pending)} from iteration {rank.pending.from_iteration}{known}"


def _at(rank: RankControl) -> str:
    if not rank.connected:
        return "not connected"
    return "before its first iteration" if rank.iteration is None else f"in iteration {rank.iteration}"


def _what(steer: Steer | None) -> str:
    if steer is None or (steer.capturing and steer.selection is None):
        return "as the script says"
    if not steer.capturing or steer.selection is None:
        return "nothing"
    return _selected(steer.selection)


def _selected(selection: Selected) -> str:
    parts = {
        "steps": selection.steps,
        "micro-batches": selection.micro_batches,
        "ranks": selection.ranks,
        "modules": selection.modules and ",".join(selection.modules),
        "tensors": selection.tensors and ",".join(selection.tensors),
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items() if value)


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
