"""What a collection run asks the daemon of its jobs, and the store where the daemon does not know."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from capd.cli.companion import Companion
from capd.cli.tool import connect
from capd.errors import EndpointError
from capd.metrics import DaemonStats, RunStats
from capd.server.endpoint import parse
from capd_client.tool_messages import Control, Stats, StatsReply

if TYPE_CHECKING:
    from capd.store.reader import Store

__all__ = ["Before", "Seen", "before", "flush", "next_attempt", "seen"]

_FLUSH_S = 30.0


class Seen(NamedTuple):
    """What a daemon says of a run, None where nothing was captured into it yet."""

    daemon: DaemonStats
    run: RunStats | None


class Before(NamedTuple):
    """What a run held when a job was started, of what the daemon counts."""

    records: int = 0
    disk_full: int = 0


def seen(companion: Companion) -> Seen | None:
    """What the daemon says of the run now; None where it does not answer."""
    with contextlib.suppress(EndpointError, ValueError), connect(parse(companion.endpoint)) as tool:
        reply = tool.request(Stats(companion.run_id))
        if isinstance(reply, StatsReply):
            daemon = DaemonStats.model_validate(reply.stats)
            return Seen(daemon, next((run for run in daemon.runs if run.run_id == companion.run_id), None))
    return None


def flush(companion: Companion) -> None:
    """Wait until what the job has captured is in the store; a job that hangs is not waited for long."""
    with contextlib.suppress(EndpointError), connect(parse(companion.endpoint)) as tool:
        tool.request(Control("flush", companion.run_id, wait_s=_FLUSH_S), _FLUSH_S + 10)


def before(companion: Companion) -> Before:
    """What is in the run already; a daemon that opens it anew counts that, too."""
    found = seen(companion)
    if found is not None and found.run is not None:
        return Before(found.run.records, found.run.dropped.get("disk_full", 0))
    store = _store(companion)
    if store is None:
        return Before()
    totals = store.totals()
    return Before(totals.records, totals.dropped.get("disk_full", 0))


def next_attempt(companion: Companion) -> int:
    """One more than any attempt in the store, so that readers take this try's records and not those of one before."""
    store = _store(companion)
    return 0 if store is None else 1 + max((session.attempt for session in store.sessions), default=-1)


def _store(companion: Companion) -> Store | None:
    from capd.store.reader import open_store

    path = (companion.store or Path()) / f"{companion.run_id}.zarr"
    return open_store(path) if path.is_dir() else None
