"""The series, moments and ranks that a rule looks at, by the selectors of `[[rule]]`."""

from __future__ import annotations

import re

from capd.rules.metrics import RuleMetric
from capd.rules.schema import TriggerSettings
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.scalars import is_scalar
from capd_client.protocol.selection import Ranges, matches_any
from capd_client.rules.patterns import compile_pattern
from capd_client.rules.schema import RangeText, texts

__all__ = ["Subjects"]


class Subjects:
    """The selection of one rule. It answers for a series once, and for each of its moments."""

    def __init__(self, rule: TriggerSettings, metric: RuleMetric) -> None:
        """Read the selectors of a checked rule."""
        self._metric = metric
        self._include, self._exclude = _patterns(rule.include), _patterns(rule.exclude)
        self._layers, self._ranks = _ranges(rule.layers), _ranges(rule.ranks)
        self._steps, self._micro_batches = _ranges(rule.steps), _ranges(rule.micro_batches)
        self._names = tuple(
            (field, frozenset(texts(wanted)))
            for field, wanted in (
                ("component", rule.components), ("tensor_name", rule.tensors),
                ("operation", rule.operations), ("phase", rule.phases),
            )
            if wanted is not None
        )  # fmt: skip
        self._globs = None if rule.series is None else texts(rule.series)
        self._of_tensors = bool(self._names or self._include or self._exclude or self._layers is not None)

    def has_series(self, path: str, key: Key) -> bool:
        """Return whether records of a series are looked at, at some moment."""
        scalar = is_scalar(key)
        if self._metric.of == "rank" or not self.has_rank(key.rank):
            return False
        if self._globs is not None and not matches_any(path, self._globs):
            return False
        if self._metric.of == "scalar":
            return scalar and key.tensor_name == self._metric.scalar
        if scalar:
            # NaN and Inf of scalars count, unless the rule selects tensors.
            return self._metric.of == "any" and not self._of_tensors
        return (
            all(getattr(key, field) in wanted for field, wanted in self._names)
            and (self._layers is None or (key.layer is not None and key.layer in self._layers))
            and (not self._include or any(one.search(key.module) for one in self._include))
            and not any(one.search(key.module) for one in self._exclude)
        )

    def has_moment(self, moment: Moment) -> bool:
        """Return whether a record of a selected series is looked at."""
        return (self._steps is None or moment.iteration in self._steps) and (
            self._micro_batches is None or moment.micro_batch in self._micro_batches
        )

    def has_rank(self, rank: int) -> bool:
        """Return whether a rank is looked at."""
        return self._ranks is None or rank in self._ranks


def _patterns(value: str | list[str] | None) -> tuple[re.Pattern[str], ...]:
    return tuple(map(compile_pattern, texts(value)))


def _ranges(value: RangeText | None) -> Ranges | None:
    return None if value is None else Ranges(str(value))
