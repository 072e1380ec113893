"""`global_statistics_report.txt`: the groups as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from capd.analyze.groups import Fields, Tally, Value
from capd.report.document import MARK
from capd.report.error_numbers import error_lines
from capd.report.format_use import format_lines
from capd.report.gather import GROUPINGS, Gathered
from capd.report.names import value_text
from capd.report.quantiles import QUANTILES, quantiles_of
from capd_client.texts import human_count, human_nbytes, table_lines

__all__ = ["report_lines", "value_text"]

_MAX_ROWS = 200
_MAX_SKIPPED = 50
_STATISTICS = ("min", "max", "absmax", "mean", "std")
_COUNTS = ("nan", "inf", "zero")
_SHARES = (0.01, 0.25, 0.5, 0.75, 0.99)
_NUMBERS = ("records", "raw", *_STATISTICS, *_COUNTS, *(f"{share:.0%}" for share in _SHARES))


def report_lines(sources: Sequence[str], gathered: Gathered, *, quick: bool) -> Iterator[str]:
    """The whole report; what was skipped comes first."""
    groups, whole = gathered.groups, gathered.groups.whole()
    yield f"{MARK} of {', '.join(sources)}"
    size = f"{human_nbytes(whole.raw_bytes)}, {human_count(whole.stats.count, 'element')}"
    yield f"{human_count(whole.records, 'record')}, {size}"
    if gathered.skipped:
        yield ""
        yield f"skipped: {human_count(len(gathered.skipped))}"
        yield from (f"  {one.name}: {one.reason}" for one in gathered.skipped[:_MAX_SKIPPED])
        yield from _more(len(gathered.skipped) - _MAX_SKIPPED)
    if gathered.without_statistics:
        yield f"{human_count(gathered.without_statistics)} records have no stored statistics; their values are left out"
    yield "quantiles: none, no element was read (--quick)" if quick else _about_quantiles(whole)
    for fields in GROUPINGS:
        yield ""
        yield from _table(fields, groups.by(*fields))
    yield from error_lines(groups)
    yield from format_lines(groups)


def _about_quantiles(whole: Tally) -> str:
    exact = whole.distribution is None or whole.distribution.exact
    return (
        "quantiles are exact"
        if exact
        else "quantiles are within 2^-8 of their value: some elements have more than 16 bits"
    )


def _table(fields: Fields, groups: Mapping[tuple[Value, ...], Tally]) -> Iterator[str]:
    rows = [(*map(value_text, values), *_cells(tally)) for values, tally in list(groups.items())[:_MAX_ROWS]]
    names = fields or ("all",)
    yield from table_lines((*names, *_NUMBERS), rows if fields else [("", *row) for row in rows], _NUMBERS)
    yield from _more(len(groups) - _MAX_ROWS)


def _cells(tally: Tally) -> tuple[str, ...]:
    at = quantiles_of(tally)
    return (
        human_count(tally.records),
        human_nbytes(tally.raw_bytes),
        *(_number(getattr(tally.stats, name)) for name in _STATISTICS),
        *(human_count(getattr(tally.stats, name)) for name in _COUNTS),
        *(_number(None if at is None else at[QUANTILES.index(share)]) for share in _SHARES),
    )


def _more(count: int) -> Iterator[str]:
    if count > 0:
        yield f"… and {human_count(count)} more: global_statistics.json has all"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
