"""The thread that judges: it takes committed records and their errors, looks at the ranks, and reports each alert.

An alert goes into the file of the run, the log, the metrics and STATS, and to a command if its rule has one. Then the
action of the rule follows. The thread never holds a lock of the pipeline. It rests for four times as long as it works,
so that it takes a fifth of a CPU.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from capd.errors import ConfigError
from capd.metrics import AlertStats
from capd.rules.firing import Firing
from capd.rules.judge import Judge
from capd.rules.refusals import refusals
from capd.rules.schema import TriggerSettings
from capd.server.rules.actions import AlertActions
from capd.server.rules.alert_counters import AlertCounters
from capd.server.rules.commands import AlertCommands
from capd.server.rules.rank_looks import RankLooks
from capd.server.rules.record_feed import MAX_WAITING_ERRORS, CommittedRecord, RecordFeed
from capd.server.rules.run_alerts import RunAlerts, alert_from
from capd.store.alerts.alert import Alert, alert_line

if TYPE_CHECKING:
    from capd.lab.stored_errors import MeasuredRow

__all__ = ["RuleWatch"]

logger = logging.getLogger(__name__)

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}
_LOOK_S = 0.2
_RANKS_S = 1.0
# Work so long, then rest for so many times as long.
_WORK_S = 0.001
_REST = 4
# Runs whose files and counters are known.
_MOST_RUNS = 1024
_COMMANDS_S = 2.0


class RuleWatch(threading.Thread):
    """The rules of a daemon. Offer it committed records by `feed`, and the rows of a lab by `errors`."""

    def __init__(
        self,
        rules: Sequence[TriggerSettings],
        root: Path,
        node: str,
        *,
        durable: bool,
        statistics: bool,
        keeps: bool = False,
        lab_formats: Sequence[str] = (),
    ) -> None:
        """Check that the daemon can do what the rules ask. The thread is not started.

        Args:
            rules: The rules, at least one.
            root: The directory of the runs.
            node: The name of the node.
            durable: Whether alerts survive a loss of power.
            statistics: Whether records have statistics.
            keeps: Whether there is a flight recorder.
            lab_formats: The formats whose errors are measured.

        Raises:
            ConfigError: A rule needs a flight recorder, statistics or errors that this daemon does not have.
        """
        super().__init__(name="capd-rules", daemon=True)
        self._judge = Judge(rules)
        self._rules, self._root, self._node, self._durable = rules, root, node, durable
        if problems := refusals(rules, statistics=statistics, keeps=keeps, lab_formats=lab_formats):
            raise ConfigError(problems[0])
        self.feed: RecordFeed[CommittedRecord] = RecordFeed()
        self.errors: RecordFeed[MeasuredRow] = RecordFeed(MAX_WAITING_ERRORS)
        self.wants_errors = any(rule.check().fmt for rule in rules)
        self._looks: RankLooks | None = None
        self._commands = AlertCommands()
        self._actions: AlertActions | None = None
        self._runs: OrderedDict[str, RunAlerts] = OrderedDict()
        self._stopping = threading.Event()
        self._next_ranks = 0.0
        self._has_failed = False
        # (run, rule) → alerts since the start.
        self._counts: Counter[tuple[str, str]] = Counter()
        self._total = self._unwritten = 0
        self._last: Alert | None = None

    # For other threads

    def begin(self, looks: RankLooks, actions: AlertActions | None = None) -> None:
        """Start the thread.

        Args:
            looks: The looks at the ranks.
            actions: What alerts do; None tells of them, and does nothing else.
        """
        self._looks, self._actions = looks, actions
        logger.info("[trigger] rules: %s", ", ".join(rule.name for rule in self._rules))
        self.start()

    def stop(self, timeout_s: float) -> None:
        """Judge what was committed so far, report it, and end. Nothing may be offered any more."""
        self._stopping.set()
        if self.is_alive():
            self.join(timeout_s)
        self._commands.stop(min(_COMMANDS_S, timeout_s))

    def counters(self) -> AlertCounters:
        """Return the counters for metrics. Every rule of a run that was looked at has one."""
        found = self._counts.copy()
        alerts: dict[tuple[str, str, str], int] = {
            (run_id, rule.name, rule.severity): found[run_id, rule.name]
            for run_id in list(self._runs)
            for rule in self._rules
        }
        return AlertCounters(alerts, self._judge.suppressed, self.feed.left_out + self.errors.left_out)

    def stats(self) -> AlertStats:
        """Return the figures of this moment."""
        last = self._last
        return AlertStats(
            rules=len(self._rules),
            alerts=self._total,
            suppressed=self._judge.suppressed,
            records=self.feed.offered,
            records_left_out=self.feed.left_out,
            errors=self.errors.offered,
            errors_left_out=self.errors.left_out,
            series_forgotten=self._judge.forgotten,
            not_stored=self._unwritten,
            commands_failed=self._commands.failed,
            commands_left_out=self._commands.left_out,
            last=None if last is None else last.text,
            last_ns=None if last is None else last.time_ns,
            last_severity=None if last is None else last.severity,
            last_run=None if last is None else last.run,
        )

    # The thread

    def run(self) -> None:
        """Judge until the daemon stops."""
        while not self._stopping.wait(_LOOK_S):
            self._safely(is_last=False)
        self._safely(is_last=True)

    def _safely(self, *, is_last: bool) -> None:
        try:
            self._records()
            self._ranks()
            self._report(self._judge.ready(time.monotonic(), all_of_them=is_last))
        except Exception:
            # This is the outermost loop of the thread, and nothing that goes wrong here may reach the pipeline.
            if not self._has_failed:
                logger.exception("[trigger] failed; further failures of this kind are not logged")
            self._has_failed = True

    def _records(self) -> None:
        began = time.monotonic()
        for _ in self._judged():
            if time.monotonic() - began < _WORK_S:
                continue
            # Other threads of the interpreter have their turn. Only a stop has no time for it.
            self._stopping.wait(_REST * (time.monotonic() - began))
            # A flood of records must not hide a rank that is silent.
            self._ranks()
            self._report(self._judge.ready(time.monotonic()))
            began = time.monotonic()

    def _judged(self) -> Iterator[None]:
        """Judge all that waits, one record or its errors at each step. Neither kind waits for the end of the other."""
        while True:
            found, measured = self.feed.take(), self.errors.take()
            if found is None and measured is None:
                return
            if found is not None:
                run_id, records = found
                self._known(run_id)
                time_ns = time.time_ns()
                for header, row in records:
                    self._judge.record(run_id, header, row, time.monotonic(), time_ns)
                    yield
            if measured is not None:
                # It is there, because the lab has written a row. Only a daemon with a lab imports it.
                from capd.lab.stored_errors import unpack_row

                run_id, rows = measured
                self._known(run_id)
                time_ns = time.time_ns()
                for series, key, moment, data in rows:
                    errors = unpack_row(data).errors
                    self._judge.errors((run_id, series, key, moment), errors, time.monotonic(), time_ns)
                    yield

    def _ranks(self) -> None:
        now = time.monotonic()
        if self._looks is None or now < self._next_ranks:
            return
        self._next_ranks = now + _RANKS_S
        for look in self._looks.look():
            self._known(look.run_id)
            for metric, value in (("silent", look.silent), ("drops", float(look.drops))):
                self._judge.rank(look[:4], metric, value, now, time.time_ns())

    def _known(self, run_id: str) -> RunAlerts:
        """Return the alerts of a run. The first call continues the cooldowns that its file tells of."""
        found = self._runs.get(run_id)
        if found is not None and found.is_current:
            return found
        if found is not None:
            self._judge.forget(run_id)
        found = RunAlerts(self._root / f"{run_id}.zarr", self._node, durable=self._durable)
        self._judge.restore(
            run_id, ((one.rule, one.rank, one.attempt, one.iteration, one.time_ns) for one in found.earlier())
        )
        self._runs[run_id] = found
        if len(self._runs) > _MOST_RUNS:
            gone, _ = self._runs.popitem(last=False)
            # What its file tells of is continued when it comes again.
            self._judge.forget(gone)
            for rule in self._rules:
                self._counts.pop((gone, rule.name), None)
        return found

    def _report(self, firings: Iterable[Firing]) -> None:
        for firing in firings:
            alert = alert_from(firing, self._node, time.time_ns())
            # The file comes first: who hears of an alert finds it there.
            self._unwritten += not self._known(firing.run_id).append([alert])
            self._counts[firing.run_id, alert.rule] += 1
            self._total += 1
            self._last = alert
            logger.log(_LEVELS[alert.severity], "[trigger] run %s: %s", alert.run, alert.text)
            if firing.rule.command is not None:
                self._commands.run(firing.rule.command, alert_line(alert))
            if self._actions is not None:
                self._actions.act(firing)
