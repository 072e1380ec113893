"""The feed of the screen: a thread that samples the daemon and reads the live catalog, again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from capd.live.alerts import NewestAlerts
from capd.live.events import MAX_EVENTS, LiveEvent
from capd.live.records import NewestRecords
from capd.live.sampler import Sampler
from capd.live.state import NodeState, RunState
from capd.top.view import TopData, TopView

__all__ = ["TopFeed"]

_JOIN_S = 0.5
# Every row of the records changes with each look.
_LOOK_S = 2.0
# The text of an alert may be long. A line of the screen is not.
_MAX_TEXT = 400


class TopFeed:
    """Samples on a thread of its own, so that a daemon that does not answer never stops the screen.

    Attributes:
        run_id: The run that was asked for; None follows the newest one with live ranks.
        client: The rank whose rates are wanted; "" for none.
    """

    def __init__(
        self,
        endpoint: Path,
        run_id: str | None,
        interval_s: float,
        show: Callable[[TopData], None] = lambda _: None,
        fail: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """Start nothing yet.

        Args:
            endpoint: The path of the daemon's socket.
            run_id: The run that was asked for.
            interval_s: The seconds between two samples.
            show: Called with each sample, from the thread.
            fail: Called with an error inside capd, from the thread, which ends then.
        """
        self._sampler = Sampler(endpoint)
        self._interval_s, self._show, self._fail = interval_s, show, fail
        self.run_id, self.client = run_id, ""
        self._newest: NewestRecords | None = None
        # The alerts of each run, by its path.
        self._alerts: dict[str, NewestAlerts] = {}
        self._alert_events: list[LiveEvent] = []
        self._clock, self._look_at = time.monotonic, 0.0
        self._stopping = threading.Event()
        # A key that asks for something else, such as another run, is answered at once.
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="capd-top", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def hurry(self) -> None:
        """Sample now."""
        self._wake.set()

    def stop(self) -> None:
        """Stop. A thread that waits for a daemon ends with the process."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def close(self) -> None:
        """Close the connection of a feed that never started."""
        self._sampler.close()

    def take(self, *, with_records: bool = True) -> TopData:
        """Return a sample of this moment. with_records: whether the catalog may be looked at, too."""
        sample = self._sampler.sample()
        run = TopView(self.run_id).run(TopData(sample))
        if run is None or sample.node is None:
            self._newest = None
            return TopData(sample, self._sampler.events)
        events, alerts = self._events(sample.node, run), self._alerts[run.path]
        newest = self._newest
        if newest is None or str(newest.run) != run.path:
            newest = self._newest = NewestRecords(Path(run.path), sample.node.node)
            self._look_at = 0.0
        if with_records and self._clock() >= self._look_at:
            newest.look()
            self._look_at = self._clock() + _LOOK_S - self._interval_s / 2
        return TopData(
            sample=sample,
            events=events,
            run_id=run.run_id,
            alerts=alerts.counts.copy(),
            alerts_problem=alerts.problem,
            records=newest.records,
            note=_note(newest),
            run_rates=self._sampler.rates(run.run_id),
            rank_rates=self._sampler.rates(run.run_id, self.client) if self.client else (),
        )

    def _events(self, node: NodeState, shown: RunState) -> tuple[LiveEvent, ...]:
        """Return the events with the alerts of the run that is shown, and of those that had live ranks."""
        before, self._alerts = self._alerts, {}
        is_new = False
        for run in node.runs:
            if run.path in before or run.live or run is shown:
                found = self._alerts[run.path] = before.get(run.path) or NewestAlerts(
                    Path(run.path), node.node
                )
                is_new |= found.look()
        if is_new or before.keys() != self._alerts.keys():
            names = {run.path: run.run_id for run in node.runs}
            self._alert_events = [
                LiveEvent(one.time_ns, one.severity, one.text[:_MAX_TEXT], names[path], is_alert=True)
                for path, alerts in self._alerts.items()
                for one in alerts.newest
            ]
        both = sorted([*self._sampler.events, *self._alert_events], key=lambda event: event.time_ns)
        return tuple(both[-MAX_EVENTS:])

    def _work(self) -> None:
        try:
            while not self._stopping.is_set():
                self._wake.clear()
                data = self.take()
                if not self._stopping.is_set():
                    self._show(data)
                self._wake.wait(self._interval_s)
        except Exception as error:
            # The screen would stand still without a word.
            self._fail(error)
        finally:
            self._sampler.close()


def _note(newest: NewestRecords) -> str:
    if newest.problem:
        return newest.problem
    if newest.damaged:
        return f"{newest.damaged} rows could not be read; see `capd verify`"
    return f"{newest.left_out:,} records passed unlisted" if newest.left_out else ""
