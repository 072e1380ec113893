"""Builds the STATS reply: what the daemon knows right now, as `capd.metrics` models."""

from __future__ import annotations

from collections import Counter

from capd.metrics import RunStats, SessionStats
from capd.server.rank import RankSession
from capd.server.run import Run
from capd.store.catalog_read import SessionRow

__all__ = ["run_stats"]


def run_stats(run: Run, ranks: list[RankSession], finished: list[SessionRow]) -> RunStats:
    """Counters of one run: the sums over its sessions, here now or gone, and the sessions themselves."""
    sessions = [_session(row, connected=False, clean=row.state != "live") for row in finished]
    sessions += [_session(rank.row(), connected=rank.connected, clean=True) for rank in ranks]
    dropped: Counter[str] = Counter()
    for session in sessions:
        dropped.update(session.dropped)
    return RunStats(
        run_id=run.run_id,
        path=str(run.path),
        offered=sum(session.offered for session in sessions),
        committed=sum(session.committed for session in sessions),
        in_flight=sum(session.in_flight for session in sessions),
        dropped=dict(dropped),
        records=run.totals.records,
        raw_bytes=run.totals.raw_bytes,
        stored_bytes=run.totals.stored_bytes,
        rate_mib_s=run.rate_mib_s(),
        sealed=run.sealed,
        sessions=sorted(sessions, key=lambda session: (session.rank, session.attempt)),
        clean=all(session.clean for session in sessions),
    )


def _session(row: SessionRow, *, connected: bool, clean: bool) -> SessionStats:
    state = row.state
    return SessionStats.model_validate(
        {
            "client": row.client.hex(),
            "rank": row.rank,
            "attempt": row.attempt,
            "host": row.host,
            "pid": row.pid,
            "state": state,
            "connected": connected,
            "offered": row.offered,
            "committed": row.committed,
            "in_flight": row.in_flight,
            "dropped": row.dropped,
            "clean": clean,
        }
    )
