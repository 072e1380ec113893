"""What one rule knows: of each series, each rank and each run. All of it is bounded."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from capd.rules.firing import Firing
from capd.rules.metrics import RuleMetric
from capd.rules.schema import BaselineSettings, TriggerSettings
from capd.rules.subjects import Subjects
from capd.rules.watched_series import WatchedSeries

__all__ = ["MOST_RANKS", "WatchedRank", "WatchingRule", "kept_state"]

# All states of rules about series together, and what one takes beside its baseline.
_STATES_NBYTES = 32 << 20
_STATE_NBYTES = 512
_MOST_STATES = 65_536
MOST_RANKS = 65_536
"""The ranks of which a rule knows something, and the runs."""

# The iterations of a rank that are known to have values outside of limits, and those with alerts.
_UNCLEAN = _FIRED = 64

Place = tuple[str, int]
FiringMoment = tuple[str, int, int, int]
K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class WatchedRank:
    """What one rule knows of one rank. fired and unclean: pairs of attempt and iteration."""

    is_outside: bool = False
    fired: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_FIRED))
    unclean: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_UNCLEAN))

    def is_quiet(self, attempt: int, iteration: int, cooldown: int) -> bool:
        """Return whether the cooldown lasts, or the iteration has its alert. Records may come late.

        A job may go back by itself: its last alert alone says what is quiet, but an iteration never fires again.
        """
        if (attempt, iteration) in self.fired:
            return True
        last = self.fired[-1] if self.fired else None
        return last is not None and last[0] == attempt and abs(iteration - last[1]) < cooldown

    def is_clean(self, attempt: int, iteration: int) -> bool:
        """Return whether no value of the iteration was outside of the limits."""
        return (attempt, iteration) not in self.unclean


class WatchingRule:
    """A rule with what it knows of series, ranks and runs."""

    def __init__(self, settings: TriggerSettings, rules: int) -> None:
        """Begin without a state. rules: the number of rules, which share the memory."""
        self.settings = settings
        self.metric: RuleMetric = settings.check()
        self.cooldown = settings.quiet_iterations
        self.subjects = Subjects(settings, self.metric)
        self.baseline: BaselineSettings | None = None
        if settings.factor_above is not None:
            self.baseline = settings.baseline or BaselineSettings()
        self.remembers = self.baseline is not None or settings.for_ > 1 or self.metric.text == "jump"
        values = self.baseline.iterations if self.baseline else 0
        room = _STATES_NBYTES // rules // (_STATE_NBYTES + 8 * values)
        self.room = min(_MOST_STATES, room)
        self.series: OrderedDict[tuple[str, str], WatchedSeries] = OrderedDict()
        self.ranks: OrderedDict[Place, WatchedRank] = OrderedDict()
        # By run, rank, attempt and iteration. A record that comes late still finds the firing of its iteration.
        self.open: dict[FiringMoment, Firing] = {}
        # Run → the times of the alerts of the last 24 hours.
        self.days: OrderedDict[str, deque[int]] = OrderedDict()


def kept_state(known: OrderedDict[K, V], key: K, make: Callable[[], V], room: int) -> tuple[V, bool]:
    """Return the state of a key as the one used last, made if necessary, and whether another had to leave for it."""
    found = known.get(key)
    if found is not None:
        known.move_to_end(key)
        return found, False
    known[key] = made = make()
    if len(known) <= room:
        return made, False
    known.popitem(last=False)
    return made, True
