"""The errors of formats on groups of records, as plain values for `capd compare --formats` (docs/json.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from capd.analyze.block_ranges import BlockRanges
from capd.analyze.blocks import BlockStatistics
from capd.analyze.error_sums import Errors
from capd.analyze.format_choice import FormatChoice
from capd.analyze.groups import Fields, Tally
from capd.analyze.shape import shape_of
from capd.analyze.verdict.score import best_of
from capd.report.gather import GatheredRecords
from capd.report.measured import NOT_MEASURED, OUTSIDE_SAMPLE

__all__ = [
    "BLOCK_SHARES", "COUNTS", "METRICS", "error_document", "error_numbers", "lab_numbers", "sample_numbers",
]  # fmt: skip

COUNTS = ("records", "count", "nan", "inf", "lost", "underflows", "saturations", "flushes")
METRICS = (
    "sqnr_db", "sqnr_db_error", "mse", "rmse", "mae", "max_abs", "relative", "relative_mse", "normalised_l2", "cosine",
    "psnr_db", "underflow_percent", "saturation_percent", "flush_percent", "lost_percent",
)  # fmt: skip
BLOCK_SHARES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_BLOCK_NUMBERS = ("count", "zero", "invalid", "saturated", "saturated_percent", "scale_type")
_VALUES = ("count", "nan", "inf", "zero", "absmax", "mean", "std")


def error_document(
    sources: Sequence[str], gathered: GatheredRecords, choices: Sequence[FormatChoice], by: Fields
) -> dict[str, Any]:
    """Return the whole comparison, with unrounded floats."""
    groups = gathered.groups
    return {
        "sources": list(sources),
        "sample": sample_numbers(gathered),
        "formats": [
            {"label": each.label, "format": each.fmt, "options": each.options, "axis": each.axis}
            for each in choices
        ],
        "by": list(by),
        "all": _group(groups.whole()),
        "groups": [
            {**dict(zip(by, values, strict=True)), **_group(tally)}
            for values, tally in (groups.by(*by).items() if by else ())
            if tally.errors
        ],
        "unmeasured": [
            {"name": name, "reason": reason, "records": records}
            for (name, reason), records in gathered.unmeasured.items()
        ],
        "skipped": [{"name": one.name, "reason": one.reason} for one in gathered.skipped],
    }


def sample_numbers(gathered: GatheredRecords) -> dict[str, Any] | None:
    """Return which records were read, and the standard error of each format's SQNR over all; None if all were read."""
    sample = gathered.sample
    if sample is None:
        return None
    return {
        **sample.numbers(),
        "operands": 0 if gathered.products is None else 3 * gathered.products.measured,
        "sqnr_db_error": {
            label: errors.sqnr_db_error for label, errors in gathered.groups.whole().errors.items()
        },
    }


def lab_numbers(gathered: GatheredRecords) -> dict[str, Any]:
    """Return the samples that were measured while capturing, and how many of their records were."""
    without = Counter[str]()
    for (_, reason), count in gathered.unmeasured.items():
        without[reason] += count
    measured = gathered.groups.whole().records - without.total()
    return {
        "samples": sorted(gathered.error_samples),
        "measured": measured,
        "in_sample": measured + without[NOT_MEASURED],
        "outside": without[OUTSIDE_SAMPLE],
    }


def _group(tally: Tally) -> dict[str, Any]:
    """Return the values of a group, and the error of each format on them."""
    distribution = tally.distribution
    shape = None if distribution is None else asdict(shape_of(distribution))
    return {
        "records": tally.records,
        "values": {
            **{name: getattr(tally.stats, name) for name in _VALUES},
            **(shape or {}),
            "exact": distribution is not None and distribution.exact,
        },
        "block_ranges": {size: _plain_ranges(ranges) for size, ranges in tally.ranges.items()} or None,
        "best": best_of(tally.errors),
        "errors": {
            label: {
                **error_numbers(errors),
                "blocks": None if errors.blocks is None else _plain_blocks(errors.blocks),
            }
            for label, errors in tally.errors.items()
        },
    }


def error_numbers(errors: Errors) -> dict[str, Any]:
    """Return the counts and metrics of one format."""
    return {name: getattr(errors, name) for name in (*COUNTS, *METRICS)}


def _plain_blocks(blocks: BlockStatistics) -> dict[str, Any]:
    found = None if blocks.sqnr is None else blocks.sqnr_quantiles(BLOCK_SHARES)
    quantiles = None if found is None else dict(zip(map(str, BLOCK_SHARES), found, strict=True))
    return {
        **{name: getattr(blocks, name) for name in _BLOCK_NUMBERS},
        "scales": _plain(blocks.scales),
        "scale_exponents": _plain(blocks.exponents()),
        "scale_log2_mean": blocks.scale_log2_mean,
        "scale_log2_std": blocks.scale_log2_std,
        "exact": None if blocks.sqnr is None else blocks.exact,
        "sqnr_db": quantiles,
        "sqnr_histogram": None if blocks.sqnr is None else _plain(blocks.sqnr),
    }


def _plain_ranges(ranges: BlockRanges) -> dict[str, Any]:
    return {
        "count": ranges.count,
        "empty": ranges.empty,
        "widest": ranges.widest,
        "range_histogram": _plain(ranges.ranges),
        "amax_exponents": _plain(ranges.amax),
    }


def _plain(histogram: Mapping[int, int]) -> dict[str, int]:
    return {str(level): count for level, count in sorted(histogram.items())}
