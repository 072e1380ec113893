"""One statistic of one kind of tensor, layer by iteration, from stored statistics alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from capd.errors import ConfigError
from capd.rules.ranges import FORMAT_RANGES
from capd.store.format.frames import StatsRow
from capd.store.format.statistics import Stats, merge, public
from capd.web.reading.catalogs import RunCatalogs
from capd.web.reading.lines import add_rows, merged_by_iteration
from capd.web.reading.ranges import outside

__all__ = ["STATISTICS", "layer_map"]

_MAX_SERIES = 2048
_MAX_COLUMNS = 160
# Of all series together. A row takes some 20 µs, and 1.5 KB until the answer is made.
_MAX_ROWS = 24_000
# Of one series at least.
_MIN_ROWS = 8


def _share(label: str, which: str) -> Callable[[Stats], float | None]:
    def of(stats: Stats) -> float | None:
        # The least possible share: what is shown is certain.
        return (
            100 * getattr(outside(stats, FORMAT_RANGES[label]), which)[0] / stats.count
            if stats.count
            else None
        )

    return of


STATISTICS: Mapping[str, Callable[[Stats], float | int | None]] = {
    "absmax": lambda stats: stats.absmax,
    "std": lambda stats: stats.std,
    "mean": lambda stats: stats.mean,
    "kurtosis": lambda stats: stats.kurtosis,
    "crest": lambda stats: stats.crest,
    "nonfinite": lambda stats: stats.nan + stats.inf,
    "zero": lambda stats: 100 * stats.zero / stats.count if stats.count else None,
    **{
        f"{which}:{label}": _share(label, which)
        for which in ("above", "below", "flushed")
        for label in FORMAT_RANGES
    },
}
"""The statistics by their names in an address."""


def layer_map(
    run: RunCatalogs, words: Sequence[str], fields: Mapping[str, str | int], statistic: str
) -> dict[str, Any]:
    """Return a statistic of the series that match, as a table of layers and iterations.

    Args:
        run: The run.
        words: What their paths contain.
        fields: Values of key fields, such as tensor_name and rank.
        statistic: A name of STATISTICS.

    Returns:
        `layers`, `paths` (the first series of each), `iterations` as [first, last] of each column, and `values` by
        layer. Series of one layer, and iterations of one column, are merged. `more`: whether so many series match that
        some are left out.

    Raises:
        ConfigError: There is no such statistic.
        StoreError: A catalog cannot be read.
    """
    if statistic not in STATISTICS:
        raise ConfigError(f"there is no statistic {statistic!r}; known: {', '.join(STATISTICS)}")
    found_places = run.of_layers(words, fields, _MAX_SERIES + 1)
    places = found_places[:_MAX_SERIES]
    each = max(_MIN_ROWS, min(2 * _MAX_COLUMNS, _MAX_ROWS // max(1, len(places))))
    step = max((-(-place.row.records // each) for place in places), default=1)
    found: dict[int, dict[int, StatsRow]] = {}
    paths: dict[int, str] = {}
    for place, rows in run.rows(places, step, each):
        layer = int(place.row.header.key.layer or 0)
        paths.setdefault(layer, place.row.header.path)
        add_rows(found.setdefault(layer, {}), merged_by_iteration(rows))
    found = dict(sorted(found.items()))
    columns = _columns(sorted({iteration for rows in found.values() for iteration in rows}))
    value = STATISTICS[statistic]
    return {
        "statistic": statistic,
        "step": step,
        "series": len(places),
        "more": len(found_places) > len(places),
        "layers": list(found),
        "paths": [paths[layer] for layer in found],
        "iterations": [[column[0], column[-1]] for column in columns],
        "values": [[_cell(rows, column, value) for column in columns] for rows in found.values()],
    }


def _columns(iterations: list[int]) -> list[list[int]]:
    width = -(-len(iterations) // _MAX_COLUMNS) or 1
    return [iterations[at : at + width] for at in range(0, len(iterations), width)]


def _cell(
    rows: Mapping[int, StatsRow], column: list[int], value: Callable[[Stats], float | int | None]
) -> float | int | None:
    merged: StatsRow | None = None
    for iteration in column:
        if iteration in rows:
            merged = rows[iteration] if merged is None else merge(merged, rows[iteration])
    return None if merged is None else value(public(merged))
