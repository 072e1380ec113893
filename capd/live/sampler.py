"""The sampler: asks a daemon for its counters, again and again, and keeps the last minute."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from capd.drops import left_out, lost
from capd.errors import EndpointError
from capd.live.events import EventLog, LiveEvent
from capd.live.state import (
    MAX_RANKS,
    MAX_RUNS,
    Earlier,
    LiveSample,
    NodeState,
    RunState,
    newest_sessions,
    ranks_of,
)
from capd.live.track import HISTORY_S, RATE_S, Track
from capd.metrics import DaemonStats, RunStats
from capd.server.net.daemon_client import Tool, connect

__all__ = ["Sampler"]

_TIMEOUT_S = 5.0
# The runs that are asked for alone if the answer for all has no room for their ranks.
_MAX_ASKED = 8
# A forecast from less than this is a guess.
_FORECAST_S = 5.0


class Sampler:
    """Samples one daemon. Not thread-safe. Every method returns within seconds, whatever the daemon does.

    A daemon that does not answer raises nothing: the sample then has the last values and the problem.
    """

    def __init__(
        self,
        endpoint: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Connect at the first sample.

        Args:
            endpoint: The path of the daemon's socket.
            clock: The time for rates, in seconds.
            wall_ns: The time of day for events.
        """
        self._endpoint, self._clock, self._wall_ns = endpoint, clock, wall_ns
        self._link = contextlib.ExitStack()
        self._tool: Tool | None = None
        self._tracks: dict[tuple[str, ...], Track] = {}
        self._iterations: dict[str, int] = {}
        self._log = EventLog()
        self._answered = 0.0
        self.last = LiveSample()

    @property
    def events(self) -> tuple[LiveEvent, ...]:
        """The last events, the newest last."""
        return self._log.events

    @property
    def events_total(self) -> int:
        """The number of events so far, with those that are not kept any more."""
        return self._log.total

    def sample(self) -> LiveSample:
        """Ask the daemon and return its state. Without an answer, return the last state and the problem."""
        now, time_ns = self._clock(), self._wall_ns()
        try:
            stats = self._ask()
        except EndpointError as error:
            self._hang_up()
            silent = now - self._answered if self.last.node is not None else 0.0
            after = LiveSample(self.last.time_ns, self.last.node, str(error), silent)
        else:
            # The counters are of the moment of the answer.
            now, time_ns = self._clock(), self._wall_ns()
            self._answered = now
            after = LiveSample(time_ns, self._state(stats, now))
        self._log.compare(self.last, after, now, time_ns)
        self.last = after
        return after

    def rates(self, run_id: str, client: str = "", points: int = 60) -> list[float | None]:
        """Return the records per second of a run, or of one of its ranks, over the last minute.

        Args:
            run_id: The run.
            client: A rank of it (`RankState.client`); "" for the whole run.
            points: The number of parts of the minute.

        Returns:
            A rate for each part, the oldest first; None where nothing is known.
        """
        track = self._tracks.get(("rank", run_id, client) if client else ("run", run_id))
        return [None] * points if track is None else track.rates(self._clock(), points)

    def close(self) -> None:
        """Close the connection."""
        self._hang_up()

    # Inside

    def _ask(self) -> DaemonStats:
        if self._tool is None:
            self._tool = self._link.enter_context(connect(self._endpoint))
        stats = self._tool.stats(timeout_s=_TIMEOUT_S)
        for at, run in list(enumerate(stats.runs))[-_MAX_ASKED:]:
            if run.offered and not run.sessions:
                # A frame has no room for the ranks of all runs.
                stats.runs[at] = next(iter(self._tool.stats(run.run_id, _TIMEOUT_S).runs), run)
        return stats

    def _hang_up(self) -> None:
        self._tool = None
        with contextlib.suppress(OSError):
            self._link.close()

    def _state(self, stats: DaemonStats, now: float) -> NodeState:
        old, self._tracks = self._tracks, {}
        if self.last.node is not None and self.last.node.pid != stats.pid:
            # Another daemon counts from its own start.
            old = {}
        runs = _chosen(stats.runs)
        room = stats.disk_free - stats.keep_free
        if stats.max_disk is not None:
            room = min(room, stats.max_disk - sum(run.stored_bytes for run in stats.runs))
        fill_s, full_in_s = self._forecast(old, stats, max(0, room), now)
        states = tuple(self._run(old, run, now) for run in runs)
        there = {rank.client: rank.iteration for run in states for rank in run.ranks}
        self._iterations = {client: at for client, at in there.items() if at is not None}
        return NodeState(
            node=stats.node,
            version=stats.version,
            pid=stats.pid,
            store=stats.store,
            uptime_s=stats.uptime_s,
            connections=stats.connections,
            arriving=stats.arriving,
            disk_free=stats.disk_free,
            keep_free=stats.keep_free,
            max_disk=stats.max_disk,
            room=max(0, room),
            fill_s=fill_s,
            full_in_s=full_in_s,
            oldest_s=stats.oldest_s,
            runs=states,
            omitted_runs=len(stats.runs) - len(runs),
            upload=stats.upload,
            rules=stats.alerts,
            lab=stats.lab,
        )

    def _run(self, old: dict[tuple[str, ...], Track], run: RunStats, now: float) -> RunState:
        newest = newest_sessions(run.sessions)
        shown = newest[:MAX_RANKS]
        rates = {
            session.client: self._counted(
                old, ("rank", run.run_id, session.client), now, session.committed
            ).rate()
            for session in shown
        }
        nothing_known = not run.sessions and run.offered
        return RunState(
            run_id=run.run_id,
            path=run.path,
            ranks=ranks_of(shown, Earlier(self._iterations, rates)),
            omitted_ranks=1 if nothing_known else len(newest) - len(shown),
            earlier=len(run.sessions) - len(newest),
            offered=run.offered,
            committed=run.committed,
            in_flight=run.in_flight,
            records=run.records,
            raw_bytes=run.raw_bytes,
            stored_bytes=run.stored_bytes,
            rate=self._counted(old, ("run", run.run_id), now, run.committed).rate(),
            nbytes_s=self._counted(old, ("bytes", run.run_id), now, run.raw_bytes).rate(),
            dropped=lost(run.dropped),
            left_out=left_out(run.dropped),
            sealed=run.sealed,
            why_full=run.why_full,
            quotas=tuple(run.quotas),
        )

    def _counted(
        self, old: dict[tuple[str, ...], Track], key: tuple[str, ...], now: float, value: int
    ) -> Track:
        track = self._tracks[key] = old.get(key) or Track()
        track.count(now, value)
        return track

    def _forecast(
        self, old: dict[tuple[str, ...], Track], stats: DaemonStats, room: int, now: float
    ) -> tuple[float | None, float | None]:
        """Return the bytes per second that fill the disk, and the seconds until it is full."""
        stored = self._counted(old, ("stored",), now, sum(run.stored_bytes for run in stats.runs))
        # Other processes fill the disk, too.
        free = self._tracks["free",] = old.get(("free",)) or Track()
        free.add(now, stats.disk_free)
        window = HISTORY_S if free.covered_s() >= _FORECAST_S else RATE_S
        falls, grows = free.rate(window), stored.rate(window)
        if falls is None and grows is None:
            return None, None
        fill = max(-(falls or 0.0), grows or 0.0, 0.0)
        is_known = fill > 0 and free.covered_s() >= _FORECAST_S
        return fill, room / fill if is_known else None


def _chosen(runs: list[RunStats]) -> list[RunStats]:
    """Return at most MAX_RUNS runs in their order: those with live ranks first, then the newest."""
    if len(runs) <= MAX_RUNS:
        return runs
    live = [any(session.state == "live" for session in run.sessions) for run in runs]
    order = sorted(range(len(runs)), key=lambda at: (live[at], at))
    return [runs[at] for at in sorted(order[-MAX_RUNS:])]
