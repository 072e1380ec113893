"""Groups of records as the page's data has them: heat maps, distributions, boxes, channels and trends."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from capd.analyze.channels import Channels
from capd.analyze.groups import Groups, Tally, Value
from capd.report.gather import BY_ITERATION, BY_LAYER, BY_RANK, BY_SAMPLE, BY_TENSOR, by_layer
from capd.report.page.plain import (
    errors_plain,
    exponents_of,
    fields_plain,
    quantiles_plain,
    short,
    tally_plain,
)
from capd.store.statistics import Stats

__all__ = [
    "boxes_data", "cells_data", "channels_data", "distributions_data", "hif8_groups", "iterations_data",
    "nonfinite_data",
]  # fmt: skip

_CHANNEL_NUMBERS = 20_000  # in all,
_MOST_ENTRIES, _LEAST_ENTRIES = 256, 16  # and of one group
_MOST_GROUPS = 500
_LARGEST = 8
_TREND_NUMBERS, _MOST_TREND, _LEAST_TREND = 20_000, 400, 16
_TRENDS = ("mean", "std", "absmax")


def cells_data(groups: Groups) -> list[dict[str, Any]]:
    """By quant type, tensor name and layer."""
    return [
        {**fields_plain(BY_LAYER, values), **tally_plain(tally), "errors": errors_plain(tally.errors)}
        for values, tally in groups.by(*BY_LAYER).items()
    ]


def distributions_data(groups: Groups) -> list[dict[str, Any]]:
    """By quant type and tensor name."""
    return [
        {
            **fields_plain(BY_TENSOR, values),
            **tally_plain(tally),
            "quantiles": quantiles_plain(tally),
            "exponents": exponents_of(tally.stats),
            "errors": errors_plain(tally.errors),
        }
        for values, tally in groups.by(*BY_TENSOR).items()
    ]


def boxes_data(groups: Groups) -> list[dict[str, Any]]:
    """Quantiles by quant type and layer; empty where no element was read."""
    stats: dict[tuple[Value, Value], Tally] = {}
    for (one, layer, _), tally in groups.by(*BY_RANK).items():
        stats.setdefault((one, layer), Tally()).add(tally, values=False)
    return [
        {
            "quant_type": one,
            "layer": layer,
            "quantiles": quantiles_plain(distribution),
            **_of(stats[one, layer].stats, "mean", "std", "min", "max"),
        }
        for (one, layer), distribution in by_layer(groups).items()
    ]


def channels_data(groups: Groups, notes: list[str]) -> list[dict[str, Any]]:
    """By quant type, tensor name and layer, of each number of channels, those with the most outliers first."""
    found = [
        (values, channels)
        for values, tally in groups.by(*BY_LAYER).items()
        for channels in tally.channels.values()
    ]
    found.sort(key=lambda one: -one[1].outlier_percent)
    if len(found) > _MOST_GROUPS:
        notes.append(
            f"channels: of {len(found):,} groups the {_MOST_GROUPS:,} with the largest share of outliers"
        )
    kept = found[:_MOST_GROUPS]
    entries = max(_LEAST_ENTRIES, min(_MOST_ENTRIES, _CHANNEL_NUMBERS // max(1, len(kept))))
    return [{**fields_plain(BY_LAYER, values), **_channels(one, entries)} for values, one in kept]


def _channels(channels: Channels, most: int) -> dict[str, Any]:
    together = -(-channels.amax.size // most)
    amax = np.maximum.reduceat(channels.amax, np.arange(0, channels.amax.size, together))
    return {
        "channels": channels.channels,
        "width": channels.width,
        "entries_per_point": together,
        "amax": [short(float(value)) for value in amax],
        "outlier_percent": short(channels.outlier_percent),
        "amax_ratio": short(channels.amax_ratio),
        "largest": [[at, short(value), number] for at, value, number in channels.largest(_LARGEST)],
    }


def iterations_data(groups: Groups, notes: list[str]) -> list[dict[str, Any]]:
    """By quant type and tensor name, over the iterations; of many iterations evenly chosen ones."""
    lines: dict[tuple[Value, Value], list[tuple[Value, Tally]]] = defaultdict(list)
    for (one, name, iteration), tally in groups.by(*BY_ITERATION).items():
        lines[one, name].append((iteration, tally))
    most = max(_LEAST_TREND, min(_MOST_TREND, _TREND_NUMBERS // max(1, len(lines))))
    if any(len(line) > most for line in lines.values()):
        notes.append(
            f"statistics against the iteration: of each tensor name at most {most:,} iterations, evenly"
        )
    return [_trend(values, line[:: -(-len(line) // most)]) for values, line in lines.items()]


def _trend(values: tuple[Value, Value], line: list[tuple[Value, Tally]]) -> dict[str, Any]:
    labels = dict.fromkeys(label for _, tally in line for label in tally.errors)
    return {
        **fields_plain(BY_TENSOR, values),
        "iteration": [iteration for iteration, _ in line],
        **{name: [short(getattr(tally.stats, name)) for _, tally in line] for name in _TRENDS},
        "errors": {
            label: {
                metric: [
                    short(getattr(tally.errors[label], metric)) if label in tally.errors else None
                    for _, tally in line
                ]
                for metric in ("sqnr_db", "underflow_percent")
            }
            for label in labels
        },
    }


def hif8_groups(groups: Groups) -> dict[str, list[dict[str, Any]]]:
    """By layer and sample, and by layer and rank: of the quant types that are HiFloat8, of all where none is."""
    types = groups.values(BY_RANK, "quant_type")
    wanted = {one for one in types if str(one).startswith("hifp8")} or set(types)
    return {
        fields[-1]: [
            {**fields_plain(fields, values), **tally_plain(tally), "quantiles": quantiles_plain(tally)}
            for values, tally in groups.by(*fields).items()
            if values[0] in wanted
        ]
        for fields in (BY_SAMPLE, BY_RANK)
    }


def nonfinite_data(groups: Groups) -> list[dict[str, Any]]:
    """Where there are NaN or Inf."""
    return [
        {**fields_plain(BY_LAYER, values), **_of(tally.stats, "nan", "inf", "count")}
        for values, tally in groups.by(*BY_LAYER).items()
        if tally.stats.nan or tally.stats.inf
    ]


def _of(stats: Stats, *names: str) -> dict[str, Any]:
    return {name: short(getattr(stats, name)) for name in names}
