"""What a collection run asks the daemon of its jobs, and the store where the daemon does not know."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from capd.cli.companion import Companion
from capd.cli.tool import REPLY_TIMEOUT_S, connect
from capd.drops import lost
from capd.errors import EndpointError
from capd.metrics import DaemonStats, RunStats
from capd.server.endpoint import parse
from capd_client.quota import Collected
from capd_client.tool_messages import Control, Stats, StatsReply

if TYPE_CHECKING:
    from capd.store.reader import Store, Totals

__all__ = [
    "LAST_REPLY_S",
    "WATCH_REPLY_S",
    "Counted",
    "Seen",
    "before",
    "counted",
    "flush",
    "next_attempt",
    "seen",
    "why_full",
]

WATCH_REPLY_S = 2.0  # a daemon that is stopped is not to keep the job beyond its time
LAST_REPLY_S = 60.0  # of a daemon that has much to do: without it nobody knows what is stored
_FLUSH_S = 30.0
_LOOK_S = 0.05


class Seen(NamedTuple):
    """What a daemon says of a run, None where nothing was captured into it yet."""

    daemon: DaemonStats
    run: RunStats | None


class Counted(NamedTuple):
    """What a run holds, of what the daemon counts. lost: drops that nobody asked for, disk_full among them."""

    records: int = 0
    lost: int = 0
    disk_full: int = 0

    def since(self, before: Counted) -> Counted:
        """What came since then."""
        return Counted(*(now - then for now, then in zip(self, before, strict=True)))


def seen(companion: Companion, timeout_s: float = REPLY_TIMEOUT_S) -> Seen | None:
    """What the daemon says of the run now; None where it does not answer."""
    with contextlib.suppress(EndpointError, ValueError), connect(parse(companion.endpoint)) as tool:
        reply = tool.request(Stats(companion.run_id), timeout_s)
        if isinstance(reply, StatsReply):
            daemon = DaemonStats.model_validate(reply.stats)
            return Seen(daemon, next((run for run in daemon.runs if run.run_id == companion.run_id), None))
    return None


def flush(companion: Companion, ranks: Sequence[Collected]) -> None:
    """Wait until what the job has captured is in the store; a job that hangs is not waited for long.

    ranks: what the job has said. One may have captured all before it has reached the daemon.
    """
    deadline = time.monotonic() + _FLUSH_S
    while time.monotonic() < deadline and not _connected(companion, ranks):
        time.sleep(_LOOK_S)
    with contextlib.suppress(EndpointError), connect(parse(companion.endpoint)) as tool:
        tool.request(Control("flush", companion.run_id, wait_s=_FLUSH_S), _FLUSH_S + 10)


def _connected(companion: Companion, ranks: Sequence[Collected]) -> bool:
    """Whether the daemon knows each process that has captured and lives; also where there is no daemon any more."""
    if companion.process is not None and companion.process.poll() is not None:
        return True
    found = seen(companion, WATCH_REPLY_S)
    known = set() if found is None or found.run is None else {one.pid for one in found.run.sessions}
    return all(one.pid in known or not Path(f"/proc/{one.pid}").exists() for one in ranks if one.kept)


def before(companion: Companion) -> Counted:
    """What is in the run already, when a job is started; a daemon that opens it anew counts that, too."""
    found = seen(companion)
    if found is not None and found.run is not None:
        return counted(found)
    store = _store(companion)
    return Counted() if store is None else _counted(store.totals())


def counted(found: Seen | None) -> Counted:
    """The run's numbers in what a daemon says."""
    return Counted() if found is None or found.run is None else _counted(found.run)


def _counted(run: RunStats | Totals) -> Counted:
    return Counted(run.records, sum(lost(run.dropped).values()), run.dropped.get("disk_full", 0))


def why_full(found: Seen | None) -> str:
    """What refused records as disk_full, and how full it is; "" where nothing did, or no daemon says it."""
    return "" if found is None or found.run is None else found.run.why_full


def next_attempt(companion: Companion) -> int:
    """One more than any attempt in the store, so that readers take this try's records and not those of one before."""
    store = _store(companion)
    return 0 if store is None else 1 + max((session.attempt for session in store.sessions), default=-1)


def _store(companion: Companion) -> Store | None:
    from capd.store.reader import open_store

    path = (companion.store or Path()) / f"{companion.run_id}.zarr"
    return open_store(path) if path.is_dir() else None
