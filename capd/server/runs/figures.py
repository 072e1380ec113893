"""The figures of the runs for metrics: sums over the ranks of a run, without the details that STATS has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from capd.metrics import WindowStats
from capd.server.rank.accounting import SessionTotals
from capd.server.rank.rank import RankSession
from capd.server.runs.run import Run
from capd.store.catalog.rows import SessionRow

__all__ = ["RankFigures", "RunFigures", "run_figures"]


@dataclass(slots=True)
class RankFigures:
    """The counters of one rank number, over all its sessions. iteration: the newest one, None before the first."""

    offered: int = 0
    committed: int = 0
    in_flight: int = 0
    dropped: int = 0
    iteration: int | None = None


@dataclass(slots=True)
class RunFigures:
    """The counters of one run at one moment, equal to those of `capd stats`.

    Attributes:
        active: A rank is here, or the run is not sealed yet.
        quiet_since: The time (monotonic) since which no rank has been here.
        sessions: The sessions by state: live, ended, died.
        arena_nbytes: The arenas of the ranks that are here.
        quota_ratio: The largest share of a quota that is used; None without a quota.
        window: What the flight recorder holds; None without one.
        ranks: The counters by rank, if they were asked for.
    """

    run_id: str
    active: bool
    quiet_since: float
    world_size: int
    quant_types: tuple[str, ...]
    raw_nbytes: int
    stored_nbytes: int
    nan: int = 0
    inf: int = 0
    offered: int = 0
    committed: int = 0
    in_flight: int = 0
    arena_nbytes: int = 0
    quota_ratio: float | None = None
    window: WindowStats | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    sessions: dict[str, int] = field(default_factory=lambda: {"live": 0, "ended": 0, "died": 0})
    ranks: dict[int, RankFigures] = field(default_factory=dict)


def run_figures(
    run: Run, ranks: list[RankSession], finished: list[SessionRow], *, each_rank: bool
) -> RunFigures:
    """Return the figures of a run from its current ranks and its finished sessions."""
    for rank in ranks:
        run.heed(rank)
    figures = RunFigures(
        run.run_id,
        active=bool(ranks) or not run.sealed,
        quiet_since=run.quiet_since,
        world_size=run.world_size,
        quant_types=tuple(sorted(run.quant_types)),
        raw_nbytes=run.totals.raw_bytes,
        stored_nbytes=run.totals.stored_bytes,
    )
    for row in finished:
        _add(figures, row.rank, row.state, row, row.dropped, each_rank=each_rank)
    for rank in ranks:
        state, totals = rank.totals()
        dropped = {reason.value: count for reason, count in totals.dropped.items()}
        _add(figures, rank.hello.rank, state, totals, dropped, each_rank=each_rank)
        figures.arena_nbytes += rank.arena_nbytes
        if each_rank and (begun := rank.begun):
            figures.ranks[rank.hello.rank].iteration = begun - 1
    return figures


def _add(
    figures: RunFigures,
    rank: int,
    state: str,
    totals: SessionTotals | SessionRow,
    dropped: dict[str, int],
    *,
    each_rank: bool,
) -> None:
    figures.sessions[state] = figures.sessions.get(state, 0) + 1
    figures.offered += totals.offered
    figures.committed += totals.committed
    figures.in_flight += totals.in_flight
    for reason, count in dropped.items():
        figures.dropped[reason] += count
    if each_rank:
        mine = figures.ranks.setdefault(rank, RankFigures())
        mine.offered += totals.offered
        mine.committed += totals.committed
        mine.in_flight += totals.in_flight
        mine.dropped += sum(dropped.values())
