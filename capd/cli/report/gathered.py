"""The sums over the selected records, for reports and figures. An empty selection is an error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from capd.cli.output import human_count, note
from capd.cli.sources import Sources, gather_shown
from capd.errors import CapdError, DamagedRecord, NothingMatched

if TYPE_CHECKING:
    from capd.report.gather import GatheredRecords

__all__ = ["contents", "contents_json", "gathered_of", "skipped_code"]


def gathered_of(
    found: Sources, place: Path, workers: int | None, *, series: bool = False, **asked: Any
) -> GatheredRecords:
    """Read all records. Records that cannot be read or measured are named on stderr and counted.

    Args:
        found: The records.
        place: The name of the records in messages.
        workers: The number of threads, None for one for each CPU.
        series: Whether to keep the sums of each series, too.
        asked: Further arguments of `capd.report.gather.gather`.

    Raises:
        NothingMatched: If there is no record.
        DamagedRecord: If no record of a run could be read.
        CapdError: If no file could be read.
    """
    from capd.report.gather import GatheredRecords
    from capd.report.series import SeriesSummaries

    gathered = GatheredRecords(series=SeriesSummaries() if series else None)
    gather_shown(found.items, gathered, workers, **asked)
    if gathered.without_statistics:
        note(
            f"{gathered.without_statistics:,} records have no stored statistics: --quick leaves their values out"
        )
    unmeasured: dict[str, int] = {}
    for (_, reason), count in gathered.unmeasured.items():
        unmeasured[reason] = unmeasured.get(reason, 0) + count
    for reason, count in unmeasured.items():
        note(f"{count:,} records have no format error: {reason}")
    if not gathered.groups.whole().records:
        if not gathered.skipped:
            raise NothingMatched(f"no tensor file in {place} matches the selection")
        kind = CapdError if found.files else DamagedRecord
        raise kind(f"nothing to report: none of {found.items.total:,} could be read")
    return gathered


def skipped_code(found: Sources, gathered: GatheredRecords) -> int:
    """Return the exit code: 4 if damaged records were skipped, 1 if bad files were skipped, otherwise 0."""
    return (1 if found.files else 4) if gathered.skipped else 0


def contents(gathered: GatheredRecords) -> str:
    """Describe the records in words, such as "860 records of 2 quant types, 3 skipped"."""
    groups = gathered.groups
    types = groups.values("quant_type")
    text = f"{human_count(groups.whole().records, 'record')} of {human_count(len(types), 'quant type')}"
    return text + (f", {human_count(len(gathered.skipped))} skipped" if gathered.skipped else "")


def contents_json(gathered: GatheredRecords) -> dict[str, Any]:
    """Describe the records as JSON values."""
    groups, whole = gathered.groups, gathered.groups.whole()
    return {
        "records": whole.records,
        "raw_bytes": whole.raw_bytes,
        "quant_types": groups.values("quant_type"),
        "skipped": [{"name": one.name, "reason": one.reason} for one in gathered.skipped],
    }
