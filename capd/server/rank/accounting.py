"""Puts a rank's own counters and the daemon's knowledge together so that they add up. Pure.

The rank counts what it offered and dropped in its arena's counter page; the daemon knows what it committed
and refused. While the rank lives, each side is right about its own part. Once it is gone, the two are
reconciled so that offered = committed + in work + Σ dropped holds exactly:

- a refusal the rank never heard of is counted from the daemon's side (the larger of both counts);
- a capture the rank gave up at exit although the daemon took it counts as taken, not as dropped;
- what is then still missing was captured by the rank and never handed over: `rank_died`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from capd.store.catalog.rows import SessionRow
from capd_client.protocol.counter_page import DropReason

__all__ = ["DAEMON_REASONS", "MAX_COUNT", "PageCounters", "SessionTotals", "reconcile", "settled"]

MAX_COUNT = 1 << 48
"""A larger counter is that of a hostile or broken rank. Sums over tens of thousands of ranks still fit 64 bits."""

DAEMON_REASONS = frozenset(
    {DropReason.BAD_DESCRIPTOR, DropReason.DISK_FULL, DropReason.STORE_ERROR, DropReason.PARTS_LOST}
)
"""Reasons that only the daemon gives (in a NACK); a rank counts them when the NACK arrives."""

# A rank counts these for everything still unacknowledged when it gives up; part of it may be committed.
_GIVEN_UP = (DropReason.NOT_CONNECTED, DropReason.REJECTED)


@dataclass(frozen=True, slots=True)
class PageCounters:
    """One reading of a rank's counter page."""

    offered: int = 0
    in_flight: int = 0
    dropped: Mapping[DropReason, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionTotals:
    """Counters of one session; at rest, offered = committed + in_flight + Σ dropped."""

    offered: int
    committed: int
    in_flight: int
    dropped: dict[DropReason, int]


def reconcile(
    page: PageCounters, committed: int, refused: Mapping[DropReason, int], *, in_work: int | None
) -> SessionTotals:
    """Merge both sides' counters.

    Args:
        page: the last reading of the counter page.
        committed: records of this client in the store, over all its connections and daemons.
        refused: refusals this daemon answered, by reason (all in DAEMON_REASONS).
        in_work: captures of a rank that is gone whose outcome is still open; None while the rank lives
            (then `in_flight` is what the rank counts).
    """
    dropped = {reason: count for reason, count in page.dropped.items() if count}
    for reason, count in refused.items():
        dropped[reason] = max(count, dropped.get(reason, 0))
    if in_work is None:
        return SessionTotals(page.offered, committed, page.in_flight, dropped)
    gap = page.offered - committed - in_work - sum(dropped.values())
    for reason in _GIVEN_UP:
        surplus = min(max(0, -gap), dropped.get(reason, 0))
        if surplus:
            dropped[reason] -= surplus
            gap += surplus
    if gap > 0:
        dropped[DropReason.RANK_DIED] = dropped.get(DropReason.RANK_DIED, 0) + gap
    return SessionTotals(
        page.offered, committed, in_work, {reason: count for reason, count in dropped.items() if count}
    )


def settled(row: SessionRow, committed: int) -> SessionRow:
    """The final counters of a rank that is gone, as a daemon left them that was killed with captures of it in work.

    committed: records of this client in the store. What is not among them was not acknowledged, and nobody has it any
    more.
    """
    page = PageCounters(row.offered, 0, {DropReason(reason): count for reason, count in row.dropped.items()})
    totals = reconcile(page, committed, {}, in_work=0)
    dropped = {reason.value: count for reason, count in totals.dropped.items()}
    return replace(row, committed=committed, in_flight=0, dropped=dropped)
