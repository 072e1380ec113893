"""The judge: applies rules to records and ranks as they come, and says when one fires. No clock, no file, no thread.

A rule fires once per rank and iteration, however many series are outside its limits. The firing stays open for a
moment, so that it lists the other series. After it the rule is quiet for its cooldown. All state is bounded: what
leaves it, and what is not said, is counted.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from capd.rules.firing import Firing
from capd.rules.format_errors import FormatErrors
from capd.rules.metrics import RuleMetric
from capd.rules.schema import TriggerSettings
from capd.rules.watched_series import WatchedSeries
from capd.rules.watching_rule import MOST_RANKS, WatchedRank, WatchingRule, kept_state
from capd.store.format.frames import RecordRow, SeriesHeader, StatsRow
from capd_client.protocol.key import Key, Moment

__all__ = ["Judge"]

# A firing waits so long for further series of its iteration.
HOLD_S = 0.5
_DAY_NS = 86_400 * 10**9
_MOST_SERIES = 65_536
# The series of one firing that are told apart.
_MOST_FIRED = 65_536

Place = tuple[str, int]


class Judge:
    """Applies rules. One thread calls it.

    Attributes:
        forgotten: The states of series that were forgotten for others.
        suppressed: The firings that a cooldown or a day's limit kept quiet.
    """

    def __init__(self, rules: Sequence[TriggerSettings]) -> None:
        """Take checked rules."""
        self._rules = [WatchingRule(one, len(rules)) for one in rules]
        # (run, series path) → the rules that look at it.
        self._looking: OrderedDict[tuple[str, str], tuple[WatchingRule, ...]] = OrderedDict()
        self.forgotten = 0
        self.suppressed = 0

    def restore(self, run_id: str, fired: Iterable[tuple[str, int, int, int, int]]) -> None:
        """Continue the cooldowns and day limits of earlier daemons.

        Args:
            run_id: The run.
            fired: Rule, rank, attempt, iteration and time_ns of each alert, in order.
        """
        rules = {rule.settings.name: rule for rule in self._rules}
        for name, rank, attempt, iteration, time_ns in fired:
            if (rule := rules.get(name)) is not None:
                kept_state(rule.ranks, (run_id, rank), WatchedRank, MOST_RANKS)[0].fired.append(
                    (attempt, iteration)
                )
                self._day(rule, run_id).append(time_ns)

    def forget(self, run_id: str) -> None:
        """Forget a run that was removed. A new one may have its name."""
        for rule in self._rules:
            rule.days.pop(run_id, None)
            for place in [place for place in rule.ranks if place[0] == run_id]:
                del rule.ranks[place]
            for moment in [moment for moment in rule.open if moment[0] == run_id]:
                del rule.open[moment]
            for path in [path for path in rule.series if path[0] == run_id]:
                del rule.series[path]

    def record(self, run_id: str, header: SeriesHeader, row: RecordRow, now_s: float, time_ns: int) -> None:
        """Apply the rules to a record. Firings come from `ready`."""
        if row.stats is None:
            return
        for rule in self._watching(run_id, header.path, header.key):
            if rule.metric.errors is None and rule.subjects.has_moment(row.moment):
                place = run_id, header.path
                state = self._remembered(rule, place, row.moment)
                value = self._value(rule, state, row.stats)
                self._apply(rule, place, header.key.rank, row.moment, state, value, now_s, time_ns)

    def errors(
        self,
        at: tuple[str, str, Key, Moment],
        errors: Mapping[str, FormatErrors],
        now_s: float,
        time_ns: int,
    ) -> None:
        """Apply the rules to the errors of formats on a record, which come after it. Firings come from `ready`.

        Args:
            at: The run, and path, key and moment of the record.
            errors: The errors by the format's label.
            now_s: The time on the caller's clock.
            time_ns: The time, as nanoseconds since 1970.
        """
        run_id, path, key, moment = at
        for rule in self._watching(run_id, path, key):
            found = errors.get(rule.metric.fmt)
            if rule.metric.errors is None or found is None or not rule.subjects.has_moment(moment):
                continue
            place = run_id, path
            state = self._remembered(rule, place, moment)
            self._apply(rule, place, key.rank, moment, state, rule.metric.errors(found), now_s, time_ns)

    def _watching(self, run_id: str, path: str, key: Key) -> tuple[WatchingRule, ...]:
        """Return the rules that look at a series."""
        looking = self._looking.get((run_id, path))
        if looking is None:
            looking = tuple(rule for rule in self._rules if rule.subjects.has_series(path, key))
            self._looking[run_id, path] = looking
            if len(self._looking) > _MOST_SERIES:
                self._looking.popitem(last=False)
        return looking

    def _apply(
        self,
        rule: WatchingRule,
        place: tuple[str, str],
        rank: int,
        moment: Moment,
        state: WatchedSeries | None,
        value: float | None,
        now_s: float,
        time_ns: int,
    ) -> None:
        run_id = place[0]
        if value is None:
            return
        if state is None or state.baseline is None:
            limit = _passed(rule.settings, rule.metric, value)
        else:
            limit = self._above_baseline(rule, state, (run_id, rank), moment, value)
        if state is not None:
            state.in_a_row = 0 if limit is None else state.in_a_row + 1
        if limit is None:
            return
        known = kept_state(rule.ranks, (run_id, rank), WatchedRank, MOST_RANKS)[0]
        now = moment.attempt, moment.iteration
        if not known.unclean or known.unclean[-1] != now:
            known.unclean.append(now)
        if state is not None and state.in_a_row < rule.settings.for_:
            return
        found = Firing(
            rule.settings, run_id, rank, moment.attempt, moment.iteration, moment.micro_batch, value, limit, now_s,
            paths={place[1]: None},
        )  # fmt: skip
        self._fire(rule, known, found, time_ns)

    def _remembered(self, rule: WatchingRule, place: tuple[str, str], moment: Moment) -> WatchedSeries | None:
        """Return the state of a rule that has one for each series."""
        return self._state(rule, place, moment.attempt) if rule.remembers else None

    def _state(self, rule: WatchingRule, place: tuple[str, str], attempt: int) -> WatchedSeries:
        state, is_full = kept_state(
            rule.series, place, partial(WatchedSeries, attempt, rule.baseline), rule.room
        )
        self.forgotten += is_full
        if state.attempt != attempt:
            state = rule.series[place] = WatchedSeries(attempt, rule.baseline)
        return state

    @staticmethod
    def _value(rule: WatchingRule, state: WatchedSeries | None, stats: StatsRow) -> float | None:
        if rule.metric.value is not None:
            return rule.metric.value(stats)
        assert state is not None  # noqa: S101 - a jump remembers
        before, absmax = state.last_absmax, stats.absmax
        if absmax is None:
            return None
        state.last_absmax = float(absmax)
        return float(absmax) / before if before else None

    @staticmethod
    def _above_baseline(
        rule: WatchingRule, state: WatchedSeries, place: Place, moment: Moment, value: float
    ) -> float | None:
        settings, wanted, baseline = rule.settings, rule.baseline, state.baseline
        # The caller has a baseline.
        assert wanted is not None  # noqa: S101
        assert baseline is not None  # noqa: S101
        assert settings.factor_above is not None  # noqa: S101
        known = kept_state(rule.ranks, place, WatchedRank, MOST_RANKS)[0]
        if not math.isfinite(value):
            # It is above any limit, and never enters the baseline.
            return math.inf
        baseline.settle(moment.iteration, partial(known.is_clean, moment.attempt))
        middle = baseline.median()
        limit = None
        if middle is not None and len(baseline) >= wanted.min:
            # For a positive median this is the factor times it.
            limit = middle + max((settings.factor_above - 1) * abs(middle), wanted.min_delta)
        baseline.take(moment.iteration, value)
        return limit if limit is not None and value > limit else None

    def rank(
        self, at: tuple[str, int, int, int], metric: str, value: float, now_s: float, time_ns: int
    ) -> None:
        """Apply the rules of a metric of ranks. A rule fires when its condition becomes true.

        Args:
            at: The run, the rank, its attempt and its iteration.
            metric: The metric.
            value: Its value.
            now_s: The time on the caller's clock.
            time_ns: The time, as nanoseconds since 1970.
        """
        run_id, rank, attempt, iteration = at
        for rule in self._rules:
            if rule.metric.text != metric or not rule.subjects.has_rank(rank):
                continue
            known = kept_state(rule.ranks, (run_id, rank), WatchedRank, MOST_RANKS)[0]
            limit = _passed(rule.settings, rule.metric, value)
            before, known.is_outside = known.is_outside, limit is not None
            if limit is not None and not before:
                self._fire(
                    rule,
                    known,
                    Firing(rule.settings, run_id, rank, attempt, iteration, 0, value, limit, now_s),
                    time_ns,
                )

    def _fire(self, rule: WatchingRule, known: WatchedRank, found: Firing, time_ns: int) -> None:
        moment = found.run_id, found.rank, found.attempt, found.iteration
        held = rule.open.get(moment)
        if held is not None:
            if len(held.paths) < _MOST_FIRED:
                held.paths |= found.paths
            return
        if known.is_quiet(found.attempt, found.iteration, rule.cooldown):
            self.suppressed += 1
            return
        day = self._day(rule, found.run_id)
        while day and time_ns - day[0] > _DAY_NS:
            day.popleft()
        if len(day) >= rule.settings.max_per_day:
            self.suppressed += 1
            return
        day.append(time_ns)
        found.is_last = len(day) == rule.settings.max_per_day
        known.fired.append((found.attempt, found.iteration))
        rule.open[moment] = found

    @staticmethod
    def _day(rule: WatchingRule, run_id: str) -> deque[int]:
        limit = rule.settings.max_per_day
        return kept_state(rule.days, run_id, lambda: deque(maxlen=limit), MOST_RANKS)[0]

    def ready(self, now_s: float, *, all_of_them: bool = False) -> list[Firing]:
        """Return the firings to report now: those that waited HOLD_S."""
        found = []
        for rule in self._rules:
            for moment, held in list(rule.open.items()):
                if all_of_them or now_s - held.opened_s >= HOLD_S:
                    found.append(rule.open.pop(moment))
        return found


def _passed(rule: TriggerSettings, metric: RuleMetric, value: float) -> float | None:
    """Return the limit that a value passes; None if it is within. A scalar that is not finite passes any limit."""
    # The statistics of a scalar do not tell the sign of an infinity.
    passes = metric.of == "scalar" and not math.isfinite(value)
    if rule.above is not None and (value > rule.above or passes):
        return float(rule.above)
    if rule.below is not None and (value < rule.below or passes):
        return float(rule.below)
    return None
