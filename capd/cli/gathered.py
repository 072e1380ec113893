"""What the records or files that a selection means come to, for reports and figures; that there is none is an error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from capd.cli.output import human_count, note
from capd.cli.sources import Found, gather_shown
from capd.errors import CapdError, DamagedRecord, NothingMatched

if TYPE_CHECKING:
    from capd.report.gather import Gathered

__all__ = ["contents", "contents_json", "gathered_of", "skipped_code"]


def gathered_of(
    found: Found, place: Path, workers: int | None, *, series: bool = False, **asked: Any
) -> Gathered:
    """Look at all items; what cannot be read is named on stderr, skipped and counted, as is what cannot be measured.

    place: what messages call them; series: of each by itself, too; asked: as `capd.report.gather.gather` takes it.
    Raises NothingMatched where there is no record, DamagedRecord or, of files, CapdError where none could be read.
    """
    from capd.report.gather import Gathered
    from capd.report.series import SeriesSummaries

    gathered = Gathered(series=SeriesSummaries() if series else None)
    gather_shown(found.items, gathered, workers, **asked)
    if gathered.without_statistics:
        note(
            f"{gathered.without_statistics:,} records have no stored statistics: --quick leaves their values out"
        )
    unmeasured: dict[str, int] = {}
    for (_, reason), count in gathered.unmeasured.items():
        unmeasured[reason] = unmeasured.get(reason, 0) + count
    for reason, count in unmeasured.items():
        note(f"{count:,} records have no error of formats: {reason}")
    if not gathered.groups.whole().records:
        if not gathered.skipped:
            raise NothingMatched(f"no tensor file in {place} matches the selection")
        kind = CapdError if found.files else DamagedRecord
        raise kind(f"nothing to report: none of {found.items.total:,} could be read")
    return gathered


def skipped_code(found: Found, gathered: Gathered) -> int:
    """The exit code of what was delivered: 4 where a damaged record was skipped, 1 where a bad file was, else 0."""
    return (1 if found.files else 4) if gathered.skipped else 0


def contents(gathered: Gathered) -> str:
    """What was looked at, in words: "860 records of 2 quant types, 3 skipped"."""
    groups = gathered.groups
    types = groups.values(("quant_type",), "quant_type")
    text = f"{human_count(groups.whole().records, 'record')} of {human_count(len(types), 'quant type')}"
    return text + (f", {human_count(len(gathered.skipped))} skipped" if gathered.skipped else "")


def contents_json(gathered: Gathered) -> dict[str, Any]:
    """The same as JSON values."""
    groups, whole = gathered.groups, gathered.groups.whole()
    return {
        "records": whole.records,
        "raw_bytes": whole.raw_bytes,
        "quant_types": groups.values(("quant_type",), "quant_type"),
        "skipped": [{"name": one.name, "reason": one.reason} for one in gathered.skipped],
    }
