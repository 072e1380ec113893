"""The sums over the selected records, for reports and figures. An empty selection is an error."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from capd.cli.output import human_count, note
from capd.cli.sources import Sources

if TYPE_CHECKING:
    from capd.analyze.format_choice import FormatChoice
    from capd.report.gather import GatheredRecords

__all__ = ["choices_of", "contents", "contents_json", "gathered_of"]


def choices_of(formats: str) -> tuple[FormatChoice, ...]:
    """Return the formats that `--formats` names, none for "none". Raises ConfigError for an unknown format."""
    from capd.analyze.format_choice import choices

    return () if formats.strip() == "none" else choices(formats)


def gathered_of(found: Sources, *, series: bool = False, **asked: Any) -> GatheredRecords:
    """Read all records. Records that cannot be read or measured are named on stderr and counted.

    `series`: whether to keep the sums of each series, and to measure the products of linear layers, too. Calls of
    several runs cannot be told apart, so products need one run. Raises CapdError as `Sources.gather` does.
    """
    from capd.report.gather import GatheredRecords
    from capd.report.products.linear_calls import LinearCalls
    from capd.report.series import SeriesSummaries

    gathered = GatheredRecords()
    if series:
        gathered.series = SeriesSummaries()
        gathered.calls = LinearCalls() if asked.get("choices") and len(found.names) == 1 else None
    found.gather(gathered, **asked)
    if gathered.without_statistics:
        note(
            f"{gathered.without_statistics:,} records were not read and have no stored statistics: their values are "
            "left out"
        )
    unmeasured: Counter[str] = Counter()
    for (_, reason), count in gathered.unmeasured.items():
        unmeasured[reason] += count
    for reason, count in unmeasured.items():
        note(f"{count:,} records have no format error: {reason}")
    return gathered


def contents(gathered: GatheredRecords) -> str:
    """Describe the records in words, such as "860 records of 2 quant types, 3 skipped"."""
    groups = gathered.groups
    types = groups.values("quant_type")
    text = f"{human_count(groups.whole().records, 'record')} of {human_count(len(types), 'quant type')}"
    if gathered.sample is not None:
        text += f", {human_count(gathered.sample.records)} of them read"
    return text + (f", {human_count(len(gathered.skipped))} skipped" if gathered.skipped else "")


def contents_json(gathered: GatheredRecords) -> dict[str, Any]:
    """Describe the records as JSON values."""
    from capd.report.format_errors import sample_numbers

    groups, whole = gathered.groups, gathered.groups.whole()
    return {
        "records": whole.records,
        "raw_bytes": whole.raw_bytes,
        "quant_types": groups.values("quant_type"),
        "sample": sample_numbers(gathered),
        "skipped": [{"name": one.name, "reason": one.reason} for one in gathered.skipped],
    }
