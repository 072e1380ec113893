"""The replies to STATS and CONTROL: the daemon's current knowledge as `capd.metrics` models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec
from pydantic import BaseModel

from capd.metrics import QuotaUse, RankControl, RunStats, Selected, SessionStats, WindowStats
from capd.metrics import Steer as ShownSteer
from capd.server.rank.rank import RankSession
from capd.server.runs.run import Run
from capd.store.catalog.rows import SessionRow
from capd.store.run.usage import Use
from capd_client.protocol.control import Steer

__all__ = ["rank_control", "run_stats"]


def run_stats(
    run: Run,
    ranks: list[RankSession],
    finished: list[SessionRow],
    uses: Sequence[Use] = (),
    window: WindowStats | None = None,
) -> RunStats:
    """Return the counters of one run: the sums over its sessions, current or finished, and the sessions themselves."""
    sessions = [_session(row, connected=False, clean=row.clean) for row in finished]
    sessions += [_live_session(rank) for rank in ranks]
    return RunStats(
        run_id=run.run_id,
        path=str(run.path),
        offered=sum(session.offered for session in sessions),
        committed=sum(session.committed for session in sessions),
        in_flight=sum(session.in_flight for session in sessions),
        dropped=dict(sum((Counter(session.dropped) for session in sessions), Counter())),
        **asdict(run.totals),
        rate_mib_s=run.rate_mib_s(),
        sealed=run.sealed,
        sessions=sorted(sessions, key=lambda session: (session.rank, session.attempt)),
        why_full=next((rank.why_full for rank in ranks if rank.why_full), run.why_full),
        clean=all(session.clean for session in sessions),
        quotas=[QuotaUse.model_validate(use._asdict()) for use in uses],
        window=window,
    )


def _session(row: SessionRow, *, connected: bool, clean: bool, **more: int | None) -> SessionStats:
    others = {"client": row.client.hex(), "connected": connected, "clean": clean}
    return SessionStats.model_validate(_shared(row, SessionStats) | others | more)


def _live_session(rank: RankSession) -> SessionStats:
    arena = {"arena_bytes": rank.arena_nbytes, "arena_used": rank.arena_used}
    return _session(rank.row(), connected=rank.connected, clean=True, iteration=_iteration(rank), **arena)


def _iteration(rank: RankSession) -> int | None:
    begun = rank.begun
    return begun - 1 if begun else None


def _shared(row: SessionRow, model: type[BaseModel]) -> dict[str, Any]:
    """Return the members of a row that `model` has under the same name."""
    return {name: getattr(row, name) for name in model.model_fields if hasattr(row, name)}


def rank_control(rank: RankSession, wanted: Steer | None) -> RankControl:
    """Return how a live rank is steered, and the part of `wanted` that it does not follow yet."""
    row, steered = rank.row(), rank.orders.steered
    in_force = None if steered is None else steered.in_force
    behind = wanted is not None and (in_force is None or in_force.id < wanted.id)
    return RankControl(
        **_shared(row, RankControl),
        run_id=rank.run_id,
        connected=rank.connected,
        iteration=_iteration(rank),
        capturing=in_force is None or in_force.capturing,
        in_force=_steer(in_force),
        since=None if steered is None else steered.since,
        modules=None if in_force is None or steered is None else steered.modules,
        pending=_steer(wanted) if behind else None,
        received=wanted is not None and steered is not None and steered.id >= wanted.id,
        problem="" if steered is None else steered.problem,
    )


def _steer(steer: Steer | None) -> ShownSteer | None:
    if steer is None:
        return None
    selection = steer.selection
    return ShownSteer(
        from_iteration=steer.from_iteration,
        capturing=steer.capturing,
        selection=None if selection is None else Selected.model_validate(msgspec.to_builtins(selection)),
    )
