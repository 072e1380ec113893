"""The table of ranks: its columns, orders and filter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from capd.live.state import RankState, RunState, main_reason, rank_state_word
from capd.top.columns import TopColumn
from capd.top.text import count, safe, speed

__all__ = ["RANK_COLUMNS", "RANK_ORDERS", "chosen_ranks"]

_STATE_STYLES = {"live": "green", "lost": "yellow", "died": "bold red", "ended": "dim"}


def _lost(rank: RankState) -> int:
    return sum(rank.dropped.values())


def _reason(rank: RankState) -> str:
    reason = main_reason(rank.dropped)
    others = len(rank.dropped) - 1
    return f"{reason} +{others}" if others > 0 else reason


def _arena(rank: RankState) -> str:
    return f"{100 * rank.arena_used // rank.arena_bytes} %" if rank.arena_bytes else "-"


def _number(value: int | None) -> str:
    return "-" if value is None else count(value)


def _drop_style(rank: RankState) -> str:
    return "red" if rank.dropped else ""


def _state_style(rank: RankState) -> str:
    return _STATE_STYLES.get(rank.state, "")


def _behind_style(rank: RankState) -> str:
    return "yellow" if rank.behind else ""


# At 40 columns: rank, step, rate, state and dropped. What changes each second is on the left, because Textual writes a
# line from its beginning to the last change.
RANK_COLUMNS: Sequence[TopColumn[RankState]] = (
    TopColumn("rank", 5, lambda rank: str(rank.rank), sort="rank"),
    TopColumn("step", 8, lambda rank: _number(rank.iteration), sort="step"),
    TopColumn("rec/s", 6, lambda rank: speed(rank.rate), sort="rate"),
    TopColumn("in flight", 10, lambda rank: count(rank.in_flight), least=73, sort="in flight"),
    TopColumn("state", 6, lambda rank: rank.state, _state_style, right=False, sort="state"),
    TopColumn("behind", 7, lambda rank: _number(rank.behind or None), _behind_style, least=62),
    TopColumn("arena", 6, _arena, least=80),
    TopColumn(
        "dropped", 8, lambda rank: count(_lost(rank)) if rank.dropped else "0", _drop_style, sort="dropped"
    ),
    TopColumn("main reason", 16, _reason, _drop_style, least=54, right=False),
    TopColumn("attempt", 7, lambda rank: str(rank.attempt), least=130),
    TopColumn("pid", 8, lambda rank: str(rank.pid), least=110),
    TopColumn("host", 8, lambda rank: safe(rank.host), least=89, right=False, grows=True),
)

_LAST = 1 << 62

RANK_ORDERS: dict[str, Callable[[RankState], Any]] = {
    "rank": lambda rank: rank.rank,
    # A straggler is what one looks for.
    "step": lambda rank: _LAST if rank.iteration is None else rank.iteration,
    "rate": lambda rank: -(rank.rate or 0.0),
    "in flight": lambda rank: -rank.in_flight,
    "dropped": lambda rank: -_lost(rank),
    "state": lambda rank: list(_STATE_STYLES).index(rank.state) if rank.state in _STATE_STYLES else 9,
}
"""The orders of the table by name. Equal ranks keep the order of their numbers."""


def chosen_ranks(run: RunState | None, order: str, wanted: str) -> list[RankState]:
    """Return the ranks whose row has the wanted text, in this order."""
    ranks = () if run is None else run.ranks
    low = wanted.lower()
    found = [rank for rank in ranks if not low or low in _text(rank)]
    return sorted(found, key=RANK_ORDERS[order])


def _text(rank: RankState) -> str:
    words = (f"rank {rank.rank}", rank.host, rank_state_word(rank), *rank.dropped)
    return " ".join(words).lower()
