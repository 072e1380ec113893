"""The HTML with which notebooks show a store, a series and a record: keys, statistics, a small histogram.

It comes from the catalog's rows alone. No element is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Protocol

import msgspec

from capd.errors import DamagedRecord
from capd.store.format.statistics import Stats, merge_stats
from capd_client.process.text import human_nbytes
from capd_client.protocol.key import Key

__all__ = ["ShownRecord", "ShownSeries", "record_html", "series_html", "store_html"]

_MOST_SERIES = 30
_MOST_RECORDS = 1000
_BIAS = 127
_WIDTH, _HEIGHT = 160, 36
_MOMENT = ("iteration", "micro_batch", "call", "sample_idx", "batch_idx", "sequence_idx", "attempt")
_STATISTICS = ("count", "nan", "inf", "zero", "min", "max", "mean", "std")


class ShownRecord(Protocol):
    """What the HTML shows of a record."""

    index: int
    shape: tuple[int, ...]
    device: str

    @property
    def committed_stats(self) -> Stats | None: ...


class ShownSeries(Protocol):
    """What the HTML shows of a series."""

    @property
    def key(self) -> Key: ...
    @property
    def path(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kept(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stored_bytes(self) -> int: ...
    @property
    def records(self) -> Sequence[ShownRecord]: ...


def record_html(path: str, record: ShownRecord) -> str:
    """Return a record as HTML: its moment, shape, device and statistics."""
    moment = {name: getattr(record, name) for name in _MOMENT}
    facts = {"shape": list(record.shape), "device": record.device}
    stats = record.committed_stats
    return _box(
        f"Record {path}#{record.index}", [_pairs({**moment, **facts}), _statistics([stats] if stats else [])]
    )


def series_html(series: ShownSeries) -> str:
    """Return a series as HTML: its key, and the merged statistics of its first 1,000 records."""
    read, records = min(len(series.records), _MOST_RECORDS), series.records
    stats, lost = [], 0
    for number in range(read):
        try:
            stats.append(records[number].committed_stats)
        except DamagedRecord:
            lost += 1
    facts = {"dtype": series.dtype, "shape": list(series.shape), "stored": human_nbytes(series.stored_bytes)}
    if series.kept == "statistics":
        facts["kept"] = "statistics alone"
    more = len(records) - read
    notes = [f"<div>Statistics of the first {read:,} records; {more:,} more.</div>"] if more else []
    notes += [f"<div>{lost:,} records are damaged; <code>capd verify</code> says more.</div>"] if lost else []
    return _box(
        f"Series {series.path}",
        [
            _pairs({**msgspec.structs.asdict(series.key), **facts}),
            _statistics([one for one in stats if one is not None]),
            *notes,
        ],
    )


def store_html(name: str, series: Sequence[ShownSeries]) -> str:
    """Return a store as HTML: one line for each of the first series, and the number of the others."""
    rows = [
        (one.path, one.dtype, " × ".join(map(str, one.shape)), human_nbytes(one.stored_bytes))
        for one in series[:_MOST_SERIES]
    ]
    more = len(series) - len(rows)
    total = human_nbytes(sum(one.stored_bytes for one in series))
    head = f"{len(series):,} series, {sum(len(one.records) for one in series):,} records, {total}"
    rest = f"<div>… and {more:,} more; <code>find()</code> selects.</div>" if more else ""
    return _box(name, [f"<div>{head}</div>", _table(("series", "dtype", "shape", "stored"), rows), rest])


def _statistics(stats: Sequence[Stats]) -> str:
    if not stats:
        return "<div>No stored statistics.</div>"
    merged = merge_stats(stats)
    numbers = {name: _number(getattr(merged, name)) for name in _STATISTICS}
    return _pairs(numbers) + _histogram(merged.exponent_histogram)


def _histogram(bins: Mapping[int, int]) -> str:
    """Return the exponent histogram as a small SVG, in the colour of the text."""
    powers = [bin_ for bin_, count in bins.items() if count and 0 < bin_ < 255]
    if not powers:
        return ""
    low, high = min(powers), max(powers)
    most, width = max(bins[bin_] for bin_ in powers), _WIDTH / (high - low + 1)
    bars = "".join(
        f'<rect x="{(bin_ - low) * width:.1f}" y="{_HEIGHT * (1 - bins[bin_] / most):.1f}" '
        f'width="{max(width - 0.5, 0.5):.1f}" height="{_HEIGHT * bins[bin_] / most:.1f}"/>'
        for bin_ in powers
    )
    label = f"2^{low - _BIAS} … 2^{high - _BIAS}"
    return (
        f'<figure style="margin:.3em 0"><svg role="img" aria-label="Exponents from {label}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" fill="currentColor">{bars}</svg><figcaption>|x| from {label}</figcaption></figure>'
    )


def _box(title: str, parts: Iterable[str]) -> str:
    return f"<div><strong>{escape(title)}</strong>{''.join(parts)}</div>"


def _pairs(facts: Mapping[str, Any]) -> str:
    return _table((), [(name, value) for name, value in facts.items() if value not in (None, "")])


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    return f'<td style="text-align:left">{escape(str(value))}</td>'


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
