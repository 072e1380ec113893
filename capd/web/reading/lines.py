"""The numbers of a tensor by iteration, from stored statistics alone: lines, exponents, shares outside of formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from capd.rules.ranges import FORMAT_RANGES
from capd.store.format.dtypes import is_statistics, stored_type
from capd.store.format.frames import RecordRow, StatsRow
from capd.store.format.statistics import Stats, is_possible, merge, public
from capd.web.reading.catalogs import RunCatalogs, SeriesPlace
from capd.web.reading.ranges import outside
from capd_client.protocol.key import Moment

__all__ = [
    "MAX_POINTS",
    "add_rows",
    "describe",
    "gaps",
    "merged_by_iteration",
    "tensor_lines",
    "without_attempt",
]

MAX_POINTS = 500
"""The most records of a series that one answer reads."""
_BIAS = 127
# A step between two points that is so many times the usual one is a gap.
_GAP = 1.5


def describe(place: SeriesPlace) -> dict[str, Any]:
    """Return what a list shows of a series."""
    row, key = place.row, place.row.header.key
    return {
        "path": row.header.path, "node": place.node, "dtype": stored_type(row.header.dtype).torch,
        "kept": "statistics" if is_statistics(row.header.dtype) else "tensor", "records": row.records,
        "shape": list(row.max_shape), "raw_bytes": row.raw_bytes, "stored_bytes": row.stored_bytes,
        **{name: getattr(key, name) for name in key.__struct_fields__},
    }  # fmt: skip


def tensor_lines(run: RunCatalogs, path: str) -> dict[str, Any]:
    """Return the numbers of one tensor by iteration.

    Args:
        run: The run.
        path: The path of the series.

    Returns:
        `iteration` with null where the line has a gap, the statistics beside it, `exponents` as [first exponent,
        counts…] of each point, and for each format its shares in percent as [least, greatest].

    Raises:
        NoSuchSeries: There is no such series.
        StoreError: A catalog cannot be read.
    """
    places = run.series(path)
    total = sum(place.row.records for place in places)
    step = -(-total // MAX_POINTS)
    rows = [row for _, found in run.rows(places, step, MAX_POINTS) for row in found]
    points = [(iteration, public(row)) for iteration, row in merged_by_iteration(rows).items()]
    stats = [found for _, found in points]
    return {
        **describe(places[0]),
        "records": total,
        "records_read": len(rows),
        "step": step,
        "without_statistics": sum(row.stats is None for row in rows),
        "iteration": [iteration for iteration, _ in points],
        "gap_after": gaps([iteration for iteration, _ in points]),
        **{name: [getattr(one, name) for one in stats] for name in _STATISTICS},
        "exponents": [_exponents(one) for one in stats],
        "formats": {label: _shares(stats, label) for label in FORMAT_RANGES},
    }


_STATISTICS = ("count", "nan", "inf", "zero", "absmax", "min", "max", "mean", "std")


def merged_by_iteration(rows: Iterable[RecordRow]) -> dict[int, StatsRow]:
    """Return the statistics of each iteration, all records of it merged, in order.

    The rows are those of one key. If records share a moment, only the job's latest attempt counts, as in `Store.find`.
    """
    newest: dict[tuple[object, ...], RecordRow] = {}
    for row in rows:
        if row.stats is None or not is_possible(row.stats):
            continue
        when = without_attempt(row.moment)
        if when not in newest or newest[when].moment.attempt <= row.moment.attempt:
            newest[when] = row
    found: dict[int, StatsRow] = {}
    for row in newest.values():
        at = row.moment.iteration
        assert row.stats is not None  # noqa: S101 - the loop above left the others out
        found[at] = merge(found[at], row.stats) if at in found else row.stats
    return dict(sorted(found.items()))


def add_rows(found: dict[int, StatsRow], rows: Mapping[int, StatsRow]) -> None:
    """Add the statistics rows of further records by iteration."""
    for iteration, row in rows.items():
        found[iteration] = merge(found[iteration], row) if iteration in found else row


def gaps(iterations: Sequence[int]) -> list[int]:
    """Return the places after which iterations are missing, compared to the usual distance between two points."""
    steps = [later - earlier for earlier, later in pairwise(iterations)]
    if not steps:
        return []
    usual = median(steps)
    return [place for place, step in enumerate(steps) if step > _GAP * usual]


def _exponents(stats: Stats) -> list[int]:
    """Return the first exponent, then the number of values of each exponent from there on."""
    present = [bin_ for bin_ in stats.exponent_histogram if 0 < bin_ < 255]
    if not present:
        return []
    return [
        min(present) - _BIAS,
        *(stats.exponent_histogram.get(bin_, 0) for bin_ in range(min(present), max(present) + 1)),
    ]


def _shares(stats: Sequence[Stats], label: str) -> Mapping[str, list[list[float] | None]]:
    found: dict[str, list[list[float] | None]] = {"above": [], "below": [], "flushed": []}
    for one in stats:
        counts = outside(one, FORMAT_RANGES[label]) if one.count else None
        for name, shares in found.items():
            pair = None if counts is None else getattr(counts, name)
            shares.append(None if pair is None else [100 * number / one.count for number in pair])
    return found


def without_attempt(m: Moment) -> tuple[object, ...]:
    """Return what records of a key and a moment share whose job was started again."""
    return (m.iteration, m.micro_batch, m.call, m.sample_idx, m.batch_idx, m.sequence_idx, m.recompute)
