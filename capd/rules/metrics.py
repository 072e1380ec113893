"""The metrics of rules: numbers of one record's statistics or format errors, of one scalar, or of one rank.

A metric of statistics takes microseconds: the statistics of a record have its counts, sums and exponent histogram.
Shares of a format come from this histogram. `underflow` counts 0 < |x| < smallest value, exactly. `saturation` counts
finite |x| of at least the first power of two above the largest value. Values between the two are not counted, except
the record's largest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from capd.rules.format_errors import ERROR_KINDS, MEASURED_FORMATS, FormatErrors
from capd.rules.ranges import ELEMENTS_OF, FORMAT_RANGES, FormatRange
from capd.store.format.frames import StatsRow
from capd.store.format.statistics import public
from capd_client.errors import ConfigError

__all__ = ["METRIC_NAMES", "RuleMetric", "parse_metric", "scalar_value"]

Value = Callable[[StatsRow], float | None]

_BIAS = 127
# Below this exponent a float32 is subnormal, and the histogram has one bin for all of them.
_MIN_EXPONENT = -126
_MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class RuleMetric:
    """A metric of a rule.

    Attributes:
        text: As in the file.
        of: The subject: tensors, tensors and scalars ("any"), one scalar, or a rank.
        low, high: The bounds of its values.
        value: The number of a record's statistics; None for metrics of a rank, and for jumps.
        scalar: The name of the scalar; "" for others.
        words: The metric in words.
        fmt: The format whose errors it is a number of, as `[lab]` names it; "" for others.
        errors: The number of these errors; None for others.
    """

    text: str
    of: Literal["tensor", "any", "scalar", "rank"]
    low: float
    high: float
    words: str
    value: Value | None = None
    scalar: str = ""
    fmt: str = ""
    errors: Callable[[FormatErrors], float | None] | None = None


def scalar_value(stats: StatsRow) -> float | None:
    """Return the value of a scalar from the statistics of its record; None if the record has several elements."""
    if stats.count != 1:
        return None
    if stats.nan:
        return math.nan
    # The statistics do not tell the sign of an infinity.
    return math.inf if stats.inf or stats.min is None else float(stats.min)


def _absmax(stats: StatsRow) -> float | None:
    return None if stats.absmax is None else float(stats.absmax)


def _mean(stats: StatsRow) -> float | None:
    finite = stats.count - stats.nan - stats.inf
    return stats.sum / finite if finite > 0 else None


def _rms(stats: StatsRow) -> float | None:
    finite = stats.count - stats.nan - stats.inf
    return math.sqrt(max(0.0, stats.sum_sq / finite)) if finite > 0 else None


def _std(stats: StatsRow) -> float | None:
    mean, finite = _mean(stats), stats.count - stats.nan - stats.inf
    if mean is None:
        return None
    square = stats.sum_sq / finite
    return math.sqrt(max(0.0, square - mean * mean)) if math.isfinite(square) else math.inf


def _kurtosis(stats: StatsRow) -> float | None:
    return public(stats).kurtosis


def _crest(stats: StatsRow) -> float | None:
    return public(stats).crest


def _zeros(stats: StatsRow) -> float | None:
    return stats.zero / stats.count if stats.count else None


_PLAIN: dict[str, RuleMetric] = {
    one.text: one
    for one in (
        RuleMetric("nan", "any", 0, math.inf, "the number of NaN", lambda stats: float(stats.nan)),
        RuleMetric("inf", "any", 0, math.inf, "the number of infinities", lambda stats: float(stats.inf)),
        RuleMetric("absmax", "tensor", 0, math.inf, "the largest magnitude", _absmax),
        RuleMetric("mean", "tensor", -math.inf, math.inf, "the mean", _mean),
        RuleMetric("std", "tensor", 0, math.inf, "the standard deviation", _std),
        RuleMetric("rms", "tensor", 0, math.inf, "the root of the mean square", _rms),
        RuleMetric(
            "kurtosis", "tensor", 1, math.inf, "the fourth moment over the square of the variance", _kurtosis
        ),
        RuleMetric(
            "crest", "tensor", 1, math.inf, "the largest magnitude over the root of the mean square", _crest
        ),
        RuleMetric("zeros", "tensor", 0, 1, "the share of zeros", _zeros),
        RuleMetric(
            "jump", "tensor", 0, math.inf, "the largest magnitude over that of the series' last record"
        ),
        RuleMetric("silent", "rank", 0, math.inf, "the seconds without an iteration or a capture"),
        RuleMetric("drops", "rank", 0, math.inf, "the captures lost within the last minute"),
    )
}

METRIC_NAMES = (
    *_PLAIN, "underflow:FORMAT", "saturation:FORMAT", "near_max:FORMAT", "sqnr:FORMAT", "relative_error:FORMAT",
    "flushed:FORMAT", "scale_std:FORMAT", "exponent:QUANTILE", "scalar:NAME",
)  # fmt: skip


def parse_metric(text: str) -> RuleMetric:
    """Return the metric of a text.

    Raises:
        ConfigError: There is no such metric, format or quantile. The message names those that there are.
    """
    kind, colon, rest = text.partition(":")
    if not colon and kind in _PLAIN:
        return _PLAIN[kind]
    if colon and kind in ERROR_KINDS and (kind not in _MADE or _is_measured(rest)):
        return _of_errors(text, kind, rest)
    make = _MADE.get(kind) if colon else None
    if make is None:
        near = get_close_matches(kind[:80], [name.partition(":")[0] for name in METRIC_NAMES], n=1)
        hint = f"did you mean {_whole(near[0])}?" if near else f"known: {', '.join(METRIC_NAMES)}"
        raise ConfigError(f"metric: {text[:80]!r} is unknown; {hint}")
    return make(text, rest)


def _whole(kind: str) -> str:
    return next(name for name in METRIC_NAMES if name.partition(":")[0] == kind)


def _is_measured(name: str) -> bool:
    """Return whether only a lab knows the errors of a format: it has scales or options."""
    return name not in FORMAT_RANGES and name.partition(":")[0] in MEASURED_FORMATS


def _of_errors(text: str, kind: str, name: str) -> RuleMetric:
    found, family = ERROR_KINDS[kind], name.partition(":")[0]
    if family not in found.formats or len(name) > _MAX_NAME_CHARS or not name.isprintable():
        near = get_close_matches(family[:80], found.formats, n=1)
        hint = f"did you mean {kind}:{near[0]}? " if near and near[0] != family else ""
        known = f"{', '.join(found.formats)}, with options as in [lab]"
        raise ConfigError(f"metric: {text[:80]!r} names no format of [lab] that has it; {hint}known: {known}")
    words = f"{found.words} {name}, on the records that [lab] measures"
    return RuleMetric(text, "tensor", found.low, found.high, words, fmt=name, errors=found.value)


def _range_of(text: str, name: str) -> FormatRange:
    if name in FORMAT_RANGES:
        return FORMAT_RANGES[name]
    known = ", ".join(FORMAT_RANGES)
    if text.partition(":")[0] in ERROR_KINDS:
        known += f"; with [lab] also {', '.join(one for one in MEASURED_FORMATS if one not in FORMAT_RANGES)}"
    if name in ELEMENTS_OF:
        elements = " or ".join(f"{text.partition(':')[0]}:{one}" for one in ELEMENTS_OF[name])
        raise ConfigError(
            f"metric: {text!r}: {name} scales its elements, so its range depends on the tensor; write {elements}, "
            "which counts without a scale"
        )
    near = get_close_matches(name[:80], FORMAT_RANGES, n=1)
    hint = f"did you mean {near[0]}? Known: {known}" if near else f"known: {known}"
    raise ConfigError(f"metric: {text[:80]!r} names no format; {hint}")


def _underflow(text: str, name: str) -> RuleMetric:
    limits = _range_of(text, name)
    if limits.smallest_exponent < _MIN_EXPONENT:
        raise ConfigError(
            f"metric: {text!r}: statistics have one bin for everything below 2^{_MIN_EXPONENT}, and the smallest "
            f"value of {name} is 2^{limits.smallest_exponent}; known: "
            f"{', '.join(one for one, found in FORMAT_RANGES.items() if found.smallest_exponent >= _MIN_EXPONENT)}"
        )
    first = limits.smallest_exponent + _BIAS

    def share(stats: StatsRow) -> float | None:
        if not stats.count:
            return None
        below = _count(stats.exponents, 0, first) - stats.zero
        return max(0, below) / stats.count

    words = f"the share of values with 0 < |x| < 2^{limits.smallest_exponent}, the smallest of {name}"
    return RuleMetric(text, "tensor", 0, 1, words, share)


def _saturation(text: str, name: str) -> RuleMetric:
    limits = _range_of(text, name)
    first = limits.first_exponent_above + _BIAS

    def share(stats: StatsRow) -> float | None:
        if not stats.count:
            return None
        above = _count(stats.exponents, first, 255)
        if not above and stats.absmax is not None and stats.absmax > limits.largest:
            above = 1
        return above / stats.count

    words = f"the share of finite values above {limits.largest:g}, the largest of {name}"
    return RuleMetric(text, "tensor", 0, 1, words, share)


def _near_max(text: str, name: str) -> RuleMetric:
    largest = _range_of(text, name).largest

    def share(stats: StatsRow) -> float | None:
        return None if stats.absmax is None else float(stats.absmax) / largest

    words = f"the largest magnitude over {largest:g}, the largest value of {name}"
    return RuleMetric(text, "tensor", 0, math.inf, words, share)


def _exponent(text: str, quantile: str) -> RuleMetric:
    try:
        part = float(quantile)
    except ValueError:
        part = math.nan
    if not 0 <= part <= 1:
        raise ConfigError(f"metric: {text[:80]!r}: a quantile is a number from 0 to 1, as in exponent:0.999")

    def exponent(stats: StatsRow) -> float | None:
        bins = stats.exponents
        total = sum(bins[at + 1] for at in range(0, len(bins), 2) if 0 < bins[at] < 255)
        wanted, seen = part * total, 0
        for at in range(0, len(bins), 2):
            if 0 < bins[at] < 255:
                seen += bins[at + 1]
                if seen >= wanted:
                    return float(bins[at] - _BIAS)
        return None

    words = f"the exponent E of the {part:g} quantile, 2^E <= |x| < 2^(E+1)"
    return RuleMetric(text, "tensor", _MIN_EXPONENT, 127, words, exponent)


def _scalar(text: str, name: str) -> RuleMetric:
    if not (0 < len(name) <= _MAX_NAME_CHARS and name.isprintable()):
        raise ConfigError(f"metric: {text[:80]!r} names no scalar; write scalar:loss")
    return RuleMetric(text, "scalar", -math.inf, math.inf, f"the scalar {name}", scalar_value, name)


_MADE: dict[str, Callable[[str, str], RuleMetric]] = {
    "underflow": _underflow,
    "saturation": _saturation,
    "near_max": _near_max,
    "exponent": _exponent,
    "scalar": _scalar,
}


def _count(bins: Sequence[int], first: int, end: int) -> int:
    """Return the number of elements in the bins first ≤ bin < end of a sparse histogram."""
    return sum(bins[at + 1] for at in range(0, len(bins), 2) if first <= bins[at] < end)
