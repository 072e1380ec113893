"""The numbers of a report as one plain document. The JSON file contains it, the text prints it, the page rounds it.

docs/json.md, "capd report", describes its fields.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from capd.analyze.channels import Channels
from capd.analyze.format_choice import FormatChoice
from capd.analyze.groups import Fields, Tally
from capd.report.format_errors import error_numbers, sample_numbers
from capd.report.format_use import format_numbers
from capd.report.gather import BY_LAYER, BY_TENSOR, BY_TYPE_AND_LAYER, GROUPINGS, GatheredRecords
from capd.report.quantiles import QUANTILES, quantiles_of
from capd.report.verdict_document import verdict_document
from capd.strict_json import strict_json

__all__ = ["MARK", "channel_numbers", "document", "grouped", "json_text", "tally_numbers"]

MARK = "capd report"
"""The words at the beginning of each file of a report. The next report may replace a file that has them."""
_FORMAT = 1
_LARGEST = 8
# Other groupings may have very many groups, so they have neither errors nor channels.
_WITH_ERRORS: tuple[Fields, ...] = (
    (),
    ("quant_type",),
    ("tensor_name",),
    BY_TENSOR,
    BY_TYPE_AND_LAYER,
    BY_LAYER,
)


def document(
    sources: Sequence[str],
    gathered: GatheredRecords,
    *,
    quick: bool,
    choices: Sequence[FormatChoice] = (),
    scalars: Sequence[dict[str, Any]] = (),
    alerts: Sequence[dict[str, Any]] = (),
    replay: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Make the document of records from the named runs or directories.

    Args:
        sources: The names of the runs or of the directory.
        gathered: The records.
        quick: Whether only stored statistics were read.
        choices: The formats that were to be measured.
        scalars: The lines of the runs' scalars (`capd.report.scalars.scalar_lines`).
        alerts: The alerts of the runs (`capd.report.alert_rows`).
        replay: The replay of the products, if recipes were named (`capd.replay.document`).
    """
    groups = gathered.groups
    return {
        "written_by": MARK,
        "format": _FORMAT,
        "sources": list(sources),
        "quick": quick,
        "sample": sample_numbers(gathered),
        "skipped": [{"name": one.name, "reason": one.reason} for one in gathered.skipped],
        "without_statistics": gathered.without_statistics,
        "unmeasured": [
            {"series": series, "reason": reason, "records": records}
            for (series, reason), records in gathered.unmeasured.items()
        ],
        "verdict": verdict_document(gathered, choices),
        "all": _group((), groups.whole()),
        "by": {
            ",".join(fields): [
                {**dict(zip(fields, values, strict=True)), **_group(fields, tally)}
                for values, tally in groups.by(*fields).items()
            ]
            for fields in GROUPINGS
            if fields
        },
        **format_numbers(groups),
        "scalars": list(scalars),
        "alerts": list(alerts),
        "replay": replay,
    }


def json_text(plain: dict[str, Any]) -> str:
    """Return the document as strict JSON."""
    return json.dumps(strict_json(plain), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def grouped(plain: dict[str, Any], fields: Fields) -> list[dict[str, Any]]:
    """Return the groups of one grouping of a document. Without fields, return the only group, all records."""
    found: list[dict[str, Any]] = plain["by"][",".join(fields)] if fields else [plain["all"]]
    return found


def _group(fields: Fields, tally: Tally) -> dict[str, Any]:
    numbers = tally_numbers(tally)
    if fields in _WITH_ERRORS:
        numbers["errors"] = {label: error_numbers(errors) for label, errors in tally.errors.items()}
        numbers["channels"] = [channel_numbers(one) for _, one in sorted(tally.channels.items())]
    return numbers


def tally_numbers(tally: Tally) -> dict[str, Any]:
    """Return the counts, statistics and quantiles of some records."""
    distribution, quantiles = tally.distribution, quantiles_of(tally)
    return {
        **tally.numbers(),
        "exponent_histogram": {str(bin_): count for bin_, count in tally.stats.exponent_histogram.items()},
        "quantiles": None if quantiles is None else dict(zip(map(str, QUANTILES), quantiles, strict=True)),
        "quantiles_exact": None if quantiles is None else distribution is not None and distribution.exact,
    }


def channel_numbers(channels: Channels) -> dict[str, Any]:
    """Return the numbers of the channels of tensors with one number of channels, and the largest channels."""
    return {
        "channels": channels.channels,
        "width": channels.width,
        "rows": channels.rows,
        "records": channels.records,
        "outlier_percent": channels.outlier_percent,
        "amax_ratio": channels.amax_ratio,
        "largest": [
            {"channel": at, "amax": amax, "outliers": outliers}
            for at, amax, outliers in channels.largest(_LARGEST)
        ],
    }
