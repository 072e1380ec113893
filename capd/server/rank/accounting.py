"""The accounting of one rank: merges its own counters with the daemon's knowledge so that they add up. Pure.

The rank counts its offered and dropped captures in the counter page of its arena. The daemon knows the committed and
refused ones. While the rank lives, each side is right about its own part, and what is in neither is in flight. When the
rank is gone, both are reconciled so that offered = committed + in work + Σ dropped holds exactly:

- A refusal that the rank never received is counted by the daemon (the larger of both counts).
- A capture that the rank gave up at exit, although the daemon took it, counts as taken and not as dropped.
- A capture that is still missing then was never handed over: it counts as `rank_died`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from capd.store.catalog.rows import SessionRow
from capd_client.protocol.counter_page import DropReason

__all__ = [
    "DAEMON_REASONS",
    "MAX_COUNT",
    "PageCounters",
    "SessionTotals",
    "reconcile",
    "settled",
    "without_given_up",
]

MAX_COUNT = 1 << 48
"""A larger counter comes from a hostile or broken rank. Sums over tens of thousands of ranks still fit 64 bits."""

DAEMON_REASONS = frozenset(
    {
        DropReason.BAD_DESCRIPTOR,
        DropReason.DISK_FULL,
        DropReason.STORE_ERROR,
        DropReason.PARTS_LOST,
        DropReason.QUOTA,
        DropReason.EXPIRED,
    }
)
"""The reasons that only the daemon gives (in a NACK). A rank counts them when the NACK arrives."""

# A rank that gives up counts these for all unacknowledged captures, some of which may be committed.
_GIVEN_UP = (DropReason.NOT_CONNECTED, DropReason.REJECTED)


@dataclass(frozen=True, slots=True)
class PageCounters:
    """One reading of a rank's counter page."""

    offered: int = 0
    dropped: Mapping[DropReason, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionTotals:
    """The counters of one session: offered = committed + in_flight + Σ dropped."""

    offered: int
    committed: int
    in_flight: int
    dropped: dict[DropReason, int]


def reconcile(
    page: PageCounters,
    committed: int,
    refused: Mapping[DropReason, int],
    *,
    in_work: int | None,
    let_go: Mapping[DropReason, int] = MappingProxyType({}),
) -> SessionTotals:
    """Merge the counters of both sides.

    Args:
        page: The last reading of the counter page.
        committed: The records of this client in the store, over all its connections and daemons.
        refused: The refusals of this daemon, by reason (all in DAEMON_REASONS).
        in_work: For a rank that is gone, the captures whose outcome is still open. None while the rank lives;
            `in_flight` is then the rest: the rank's own count is of another moment.
        let_go: The captures that were acknowledged as held and are not committed, by reason, over all daemons. The
            rank counts none of them.
    """
    dropped = {reason: count for reason, count in page.dropped.items() if count}
    for reason, count in refused.items():
        dropped[reason] = max(count, dropped.get(reason, 0))
    for reason, count in let_go.items():
        dropped[reason] = dropped.get(reason, 0) + count
    if in_work is None:
        in_work = max(0, page.offered - committed - sum(dropped.values()))
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


def without_given_up(page: PageCounters) -> PageCounters:
    """Return the page without what the rank gave up at its exit. As long as it is here, that counts as in flight."""
    dropped = {reason: count for reason, count in page.dropped.items() if reason not in _GIVEN_UP}
    return PageCounters(page.offered, dropped)


def settled(
    row: SessionRow, committed: int, let_go: Mapping[DropReason, int] = MappingProxyType({})
) -> SessionRow:
    """Return the final counters of a rank that is gone, from a row that a killed daemon left with captures in work.

    Any capture that is not among the `committed` records of the client, and was not let go, was not acknowledged and
    is lost. The captures that are known may be more than the row, which is up to a second old, has as offered.

    Args:
        row: The last row.
        committed: The records of the client in the store.
        let_go: As in `reconcile`.
    """
    dropped = {DropReason(reason): count for reason, count in row.dropped.items()}
    for name, count in row.let_go.items():
        dropped[DropReason(name)] = max(0, dropped.get(DropReason(name), 0) - count)
    known = committed + sum(dropped.values()) + sum(let_go.values())
    offered = max(row.offered, known) if let_go or row.let_go else row.offered
    totals = reconcile(PageCounters(offered, dropped), committed, {}, in_work=0, let_go=let_go)
    return replace(
        row,
        offered=totals.offered,
        committed=committed,
        in_flight=0,
        dropped={reason.value: count for reason, count in totals.dropped.items()},
        let_go={reason.value: count for reason, count in let_go.items() if count},
    )
