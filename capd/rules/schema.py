"""The schema of `[[trigger]]` in capd.toml: the keys of a rule, their types, and which values fit together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from capd.rules.metrics import RuleMetric, parse_metric
from capd_client.errors import ConfigError
from capd_client.rules.schema import RangeText, RuleSettings, texts, unknown_setting

__all__ = ["MAX_TRIGGERS", "BaselineSettings", "TriggerSettings", "parse_triggers", "trigger_problems"]

MAX_TRIGGERS = 32
_MAX_NAME_CHARS = 64
_MAX_WORDS = 64
_MAX_WORD_CHARS = 4096
_MAX_GLOB_CHARS = 1024
_COOLDOWN = 100
_PHASES = ("pre", "post")
_SELECTORS = (
    "include", "exclude", "layers", "components", "tensors", "operations", "steps", "micro_batches", "ranks",
)  # fmt: skip
# What a metric without tensors can be selected by.
_OF_SCALARS = ("steps", "ranks")
_OF_RANKS = ("ranks",)

Number = int | float
_Texts = str | list[str]
_Count = Annotated[int, Meta(ge=0, le=10**9)]
_Some = Annotated[int, Meta(ge=1, le=10**6)]


class BaselineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The baseline of `factor_above`: a statistic of the series' own values in earlier iterations.

    Attributes:
        statistic: "median".
        iterations: The iterations that it covers.
        min: The iterations that it needs before it says anything.
        min_delta: The value must be this much above the baseline, too.
    """

    statistic: Literal["median"] = "median"
    iterations: Annotated[int, Meta(ge=1, le=1000)] = 50
    min: Annotated[int, Meta(ge=1, le=1000)] = 20
    min_delta: Number = 0


class TriggerSettings(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"for_": "for"}
):
    """One rule. The selectors are those of `[[rule]]`, `phases` and `series`; None excludes nothing.

    Attributes:
        name: The name in alerts.
        metric: One of METRIC_NAMES.
        above, below: The limits; a value outside of them fires.
        factor_above: A value above the baseline by this factor fires.
        series: Globs of the paths of series, as `capd ls` prints them.
        for_: The records in a row of one series that must be outside.
        cooldown: The iterations after an alert in which the rule is quiet for this rank. None: 100, but 0 for metrics
            of ranks, because a rank that hangs begins no iteration.
        max_per_day: The most alerts of the rule in 24 hours of one run.
        severity: "info", "warning" or "critical".
        action: "warn"; "keep" for the flight recorder; "capture" for every iteration from now on; "stop-capture".
        post: The iterations that "keep" keeps after the alert; None: as `[window]` says.
        command: A program and its arguments; it gets the alert as JSON.
    """

    name: str
    metric: str
    above: Number | None = None
    below: Number | None = None
    factor_above: Number | None = None
    baseline: BaselineSettings | None = None
    include: _Texts | None = None
    exclude: _Texts | None = None
    layers: RangeText | None = None
    components: _Texts | None = None
    tensors: _Texts | None = None
    operations: _Texts | None = None
    phases: _Texts | None = None
    series: _Texts | None = None
    steps: RangeText | None = None
    micro_batches: RangeText | None = None
    ranks: RangeText | None = None
    for_: _Some = 1
    cooldown: _Count | None = None
    max_per_day: _Some = 100
    severity: Literal["info", "warning", "critical"] = "warning"
    action: Literal["warn", "keep", "capture", "stop-capture"] = "warn"
    post: Annotated[int, Meta(ge=0, le=10_000)] | None = None
    command: list[str] | None = None

    @property
    def selection(self) -> RuleSettings:
        """The selectors as those of a `[[rule]]`."""
        return RuleSettings(**{name: getattr(self, name) for name in _SELECTORS})

    @property
    def quiet_iterations(self) -> int:
        """The cooldown in effect."""
        if self.cooldown is not None:
            return self.cooldown
        return 0 if parse_metric(self.metric).of == "rank" else _COOLDOWN

    def check(self) -> RuleMetric:
        """Check the values, each alone and together, and return the metric.

        Raises:
            ConfigError: A value is not accepted, or contradicts another. The message names the key.
        """
        if not (0 < len(self.name) <= _MAX_NAME_CHARS and self.name.isprintable()):
            raise ConfigError(f"name: 1 to {_MAX_NAME_CHARS} printable characters, not {self.name[:80]!r}")
        metric = parse_metric(self.metric)
        self.selection.check()
        for phase in texts(self.phases):
            if phase not in _PHASES:
                raise ConfigError(f"phases: {phase[:80]!r} is unknown; known: {', '.join(_PHASES)}")
        if self.series is not None:
            _check_globs(texts(self.series))
        self._check_fitting(metric)
        self._check_limits(metric)
        self._check_command()
        if self.post is not None and self.action != "keep":
            raise ConfigError('post: it needs action = "keep"')
        return metric

    def _check_fitting(self, metric: RuleMetric) -> None:
        allowed: Sequence[str] | None = {"scalar": _OF_SCALARS, "rank": _OF_RANKS}.get(metric.of)
        for name in (*_SELECTORS, "phases", "series"):
            if allowed is not None and getattr(self, name) is not None and name not in allowed:
                raise ConfigError(f"{name}: {metric.text} is selected by {' and '.join(allowed)} alone")
        if metric.of == "rank" and self.for_ != 1:
            raise ConfigError(f"for: {metric.text} counts no records; leave it out")

    def _check_limits(self, metric: RuleMetric) -> None:
        for name in ("above", "below", "factor_above"):
            value = getattr(self, name)
            if value is not None and not _is_finite(value):
                raise ConfigError(f"{name}: a finite number, not {str(value)[:80]}")
        above, below = self.above, self.below
        if self.factor_above is not None:
            self._check_factor(metric)
        elif self.baseline is not None:
            raise ConfigError("baseline: it needs factor_above")
        elif above is None and below is None:
            raise ConfigError("above: missing; give above, below or factor_above")
        if above is not None and below is not None and below > above:
            raise ConfigError(
                f"above: every value is above {above:g} or below {below:g}; a band has below = its lower end and "
                "above = its upper end"
            )
        if above is not None and above >= metric.high:
            raise ConfigError(
                f"above: {metric.text} is never above {metric.high:g}, so {above:g} never fires"
            )
        if below is not None and below <= metric.low:
            raise ConfigError(f"below: {metric.text} is never below {metric.low:g}, so {below:g} never fires")
        if below is not None and below > metric.high:
            raise ConfigError(f"below: {metric.text} is always below {below:g}; it ends at {metric.high:g}")
        if above is not None and above < metric.low:
            raise ConfigError(f"above: {metric.text} is always above {above:g}; it begins at {metric.low:g}")

    def _check_factor(self, metric: RuleMetric) -> None:
        assert self.factor_above is not None  # noqa: S101 - the caller has asked
        if self.above is not None or self.below is not None:
            raise ConfigError("factor_above: a rule has it, or above and below; write two rules")
        if metric.of == "rank" or metric.text == "jump":
            raise ConfigError(f"factor_above: {metric.text} has no baseline; give above")
        if metric.fmt and metric.text.startswith("sqnr:"):
            raise ConfigError(f"factor_above: {metric.text} is better the larger it is; give below")
        if self.factor_above <= 1:
            raise ConfigError(f"factor_above: a number above 1, not {self.factor_above:g}")
        found = self.baseline or BaselineSettings()
        if found.min > found.iterations:
            raise ConfigError(f"baseline: min = {found.min} is more than iterations = {found.iterations}")
        if not (_is_finite(found.min_delta) and found.min_delta >= 0):
            raise ConfigError(f"baseline: min_delta: a number from 0, not {str(found.min_delta)[:80]}")

    def _check_command(self) -> None:
        if self.command is None:
            return
        words = self.command
        if not 0 < len(words) <= _MAX_WORDS or not words[0]:
            raise ConfigError(
                f'command: a list of a program and its arguments, such as ["mail", "me"], not {words!r}'
            )
        if any(len(word) > _MAX_WORD_CHARS or "\0" in word for word in words):
            raise ConfigError(f"command: an argument has at most {_MAX_WORD_CHARS} characters, and no NUL")


def _is_finite(value: Number) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        # TOML has whole numbers of any size.
        return False


def _check_globs(globs: Sequence[str]) -> None:
    if not 0 < len(globs) <= _MAX_WORDS:
        raise ConfigError(f"series: 1 to {_MAX_WORDS} globs, not {len(globs)}; leave it out to have all")
    for glob in globs:
        if not 0 < len(glob) <= _MAX_GLOB_CHARS or not glob.isprintable():
            raise ConfigError(
                f"series: {glob[:80]!r} is no glob of 1 to {_MAX_GLOB_CHARS} printable characters"
            )


def parse_triggers(tables: Sequence[Any]) -> list[TriggerSettings]:
    """Return the rules of the tables `[[trigger]]`.

    Raises:
        ConfigError: One of them cannot be used. The message is the first of `trigger_problems`.
    """
    problems = trigger_problems(tables)
    if problems:
        more = f" (and {len(problems) - 1} more; `capd rules check` lists them)" if len(problems) > 1 else ""
        raise ConfigError(problems[0] + more)
    return [msgspec.convert(table, TriggerSettings) for table in tables]


def trigger_problems(tables: Any) -> list[str]:
    """Return one sentence for each problem of the tables `[[trigger]]`; each names the table and the key."""
    if not isinstance(tables, list):
        return ["trigger: a list of tables; write [[trigger]]"]
    if len(tables) > MAX_TRIGGERS:
        return [f"trigger: {len(tables)} tables; at most {MAX_TRIGGERS} are allowed"]
    problems: list[str] = []
    seen: set[str] = set()
    for number, table in enumerate(tables, 1):
        if not isinstance(table, Mapping):
            problems.append(f"trigger {number}: a table, not {type(table).__name__}")
            continue
        label = _label(table, number)
        problems += [f"{label}: {problem}" for problem in _problems_of(table)]
        name = table.get("name")
        if isinstance(name, str):
            if name in seen:
                problems.append(f"{label}: name: two triggers have this name")
            seen.add(name)
    return problems


_ALLOWED = {
    "severity": ("info", "warning", "critical"),
    "action": ("warn", "keep", "capture", "stop-capture"),
    "baseline.statistic": ("median",),
}
_KEYS = TriggerSettings.__struct_encode_fields__
# Complete for the check of one other key.
_COMPLETE = {"name": "x", "metric": "nan", "above": 0}


def _problems_of(table: Mapping[str, Any]) -> list[str]:
    found = []
    for key, value in table.items():
        if key not in _KEYS:
            found.append(unknown_setting(key, _KEYS))
        elif problem := _problem(lambda one: msgspec.convert(one, TriggerSettings), _COMPLETE | {key: value}):
            found.append(problem)
    # Values that are right alone may contradict each other.
    last = "" if found else _problem(lambda one: msgspec.convert(one, TriggerSettings).check(), table)
    return [*found, last] if last else found


def _problem(check: Callable[[Any], object], table: Mapping[str, Any]) -> str:
    try:
        check(table)
    except (ConfigError, msgspec.ValidationError) as error:
        # msgspec says "Expected `int`, got `str` - at `$.field`".
        what, _, where = str(error).partition(" - at `$")
        if what.startswith("Invalid enum value") and (allowed := _ALLOWED.get(where.strip(".`"))):
            what += f"; known: {', '.join(allowed)}"
        return ": ".join(part for part in (where.strip(".`"), what) if part)
    return ""


def _label(table: Mapping[str, Any], number: int) -> str:
    name = table.get("name")
    return f"trigger {name[:_MAX_NAME_CHARS] if isinstance(name, str) and name else str(number)!r}"
