"""`global_statistics.json`: every group as numbers (docs/json.md, "capd report")."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from capd.analyze.groups import STATISTICS, Fields, Tally, Value
from capd.report.error_numbers import error_numbers
from capd.report.format_use import format_numbers
from capd.report.gather import GROUPINGS, Gathered
from capd.report.quantiles import QUANTILES, quantiles_of
from capd.strict_json import strict_json

__all__ = ["MARK", "document", "json_text"]

MARK = "capd report"
"""At the beginning of each file that a report writes: what has it may be replaced by the next one."""
_FORMAT = 1


def document(sources: Sequence[str], gathered: Gathered, *, quick: bool) -> dict[str, Any]:
    """The whole document, floats as they are."""
    groups = gathered.groups
    return {
        "written_by": MARK,
        "format": _FORMAT,
        "sources": list(sources),
        "quick": quick,
        "skipped": [{"name": one.name, "reason": one.reason} for one in gathered.skipped],
        "without_statistics": gathered.without_statistics,
        "unmeasured": [
            {"series": series, "reason": reason, "records": records}
            for (series, reason), records in gathered.unmeasured.items()
        ],
        "all": _tally((), groups.whole()),
        "by": {
            ",".join(fields): [_group(fields, values, tally) for values, tally in groups.by(*fields).items()]
            for fields in GROUPINGS
            if fields
        },
        **format_numbers(groups),
    }


def json_text(plain: dict[str, Any]) -> str:
    """As strict JSON."""
    return json.dumps(strict_json(plain), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _group(fields: Fields, values: Sequence[Value], tally: Tally) -> dict[str, Any]:
    return {**dict(zip(fields, values, strict=True)), **_tally(fields, tally)}


def _tally(grouping: Fields, tally: Tally) -> dict[str, Any]:
    quantiles = quantiles_of(tally)
    return {
        "records": tally.records,
        "raw_bytes": tally.raw_bytes,
        **{name: getattr(tally.stats, name) for name in STATISTICS},
        "exponent_histogram": {str(bin_): count for bin_, count in tally.stats.exponent_histogram.items()},
        "quantiles": None if quantiles is None else dict(zip(map(str, QUANTILES), quantiles, strict=True)),
        "quantiles_exact": None
        if quantiles is None
        else bool(tally.distribution and tally.distribution.exact),
        **error_numbers(grouping, tally),
    }
