"""The run that a collection's job captures into, read from the daemon's counters or from the store."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from capd.cli.jobs.companion import Companion
from capd.collect.watching import Observation
from capd.drops import lost
from capd.errors import EndpointError
from capd.metrics import DaemonStats, RunStats
from capd.server.net.daemon_client import REPLY_TIMEOUT_S, connect
from capd.server.net.endpoint import parse
from capd_client.process.documents import left
from capd_client.protocol.control import Control
from capd_client.protocol.quota import Collected

if TYPE_CHECKING:
    from capd.store.catalog.rows import SessionRow

__all__ = ["CollectedRun", "DaemonView"]

# A stopped daemon must not keep the job past its end.
_WATCH_REPLY_S = 2.0
# A busy daemon gets time, because only its reply says what is stored.
_LAST_REPLY_S = 60.0
_FLUSH_S = 30.0
_LOOK_S = 0.05


class DaemonView(NamedTuple):
    """The counters of a daemon and of a run. `run` is None before anything was captured into it."""

    daemon: DaemonStats
    run: RunStats | None


class CollectedRun:
    """The run of one job of a collection. Only the sessions of this job's ranks count.

    Attributes:
        view: The daemon's last reply, None if it did not answer.
        records: The records of the job by that reply.
        attempt: A number above all attempts before this job, so that readers take the records of the job.
    """

    def __init__(self, companion: Companion, documents: Path) -> None:
        """Remember the sessions that the run already has. Processes of the job write to `documents`."""
        self._companion, self._documents = companion, documents
        self.view = _asked(companion, REPLY_TIMEOUT_S)
        run = None if self.view is None else self.view.run
        stored = _stored_sessions(companion)
        self._earlier = {one.client.hex() for one in stored}
        self._earlier |= set() if run is None else {one.client for one in run.sessions}
        self.attempt = 1 + max((one.attempt for one in stored), default=-1)
        self.records = 0

    def look(self, *, last: bool = False) -> Observation:
        """Ask the daemon and the job for their progress. The last time, the daemon gets more time and must answer."""
        self.view = _asked(self._companion, _LAST_REPLY_S if last else _WATCH_REPLY_S)
        run = None if self.view is None else self.view.run
        sessions = [] if run is None else [one for one in run.sessions if one.client not in self._earlier]
        dropped: Counter[str] = Counter()
        for session in sessions:
            dropped.update(session.dropped)
        if self.view is not None:
            self.records = sum(session.committed for session in sessions)
        return Observation(
            time.monotonic(),
            self._ranks(),
            self.records,
            lost=sum(lost(dropped).values()),
            disk_full=dropped["disk_full"] > 0,
            why_full="" if run is None else run.why_full,
            daemon_ended=self.view is None if last else self._daemon_ended(),
        )

    def flush(self) -> None:
        """Wait until the captures of the job are in the store. A job that hangs gets little time."""
        deadline = time.monotonic() + _FLUSH_S
        ranks = self._ranks()
        while time.monotonic() < deadline and not self._connected(ranks):
            time.sleep(_LOOK_S)
        with contextlib.suppress(EndpointError), connect(parse(self._companion.endpoint)) as tool:
            tool.request(Control("flush", self._companion.run_id, wait_s=_FLUSH_S), _FLUSH_S + 10)

    def _connected(self, ranks: list[Collected]) -> bool:
        """Return whether the daemon knows each living process that has captured, or has ended itself.

        A process may have captured everything before it reaches the daemon.
        """
        if self._daemon_ended():
            return True
        view = _asked(self._companion, _WATCH_REPLY_S)
        known = set() if view is None or view.run is None else {one.pid for one in view.run.sessions}
        return all(one.pid in known or not Path(f"/proc/{one.pid}").exists() for one in ranks if one.kept)

    def _ranks(self) -> list[Collected]:
        return left(self._documents, Collected)

    def _daemon_ended(self) -> bool:
        return self._companion.process is not None and self._companion.process.poll() is not None


def _asked(companion: Companion, timeout_s: float) -> DaemonView | None:
    """Return the daemon's counters now, None if it does not answer."""
    with contextlib.suppress(EndpointError), connect(parse(companion.endpoint)) as tool:
        daemon = tool.stats(companion.run_id, timeout_s)
        run = next((run for run in daemon.runs if run.run_id == companion.run_id), None)
        return DaemonView(daemon, run)
    return None


def _stored_sessions(companion: Companion) -> Sequence[SessionRow]:
    from capd.store.read.store import open_store

    path = (companion.store or Path()) / f"{companion.run_id}.zarr"
    return open_store(path).sessions if path.is_dir() else ()
