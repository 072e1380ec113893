"""The groups of records in the page's data: heat maps, distributions, boxes, channels and trends."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from capd.analyze.channels import Channels
from capd.analyze.groups import Groups, Tally, Value
from capd.io.beside import type_within_run
from capd.report.binades import binades
from capd.report.document import channel_numbers, grouped, tally_numbers
from capd.report.format_use import overflow_numbers
from capd.report.gather import BY_ITERATION, BY_LAYER, BY_RANK, BY_SAMPLE, BY_TENSOR, by_layer
from capd.report.page.plain import NUMBERS, errors_of, exponents_of, picked, quantiles_of, rounded

__all__ = [
    "Notes", "boxes_data", "cells_data", "channels_data", "distributions_data", "hif8_groups", "iterations_data",
    "nonfinite_data", "overflow_data", "tensor_boxes_data",
]  # fmt: skip

Notes = list[dict[str, Any]]
"""What the page leaves out: `about` is one of the words of `NOTES` in overview.js, the others are its numbers."""

# The limit for all groups together.
_CHANNEL_NUMBERS = 20_000
# The limits for one group.
_MOST_ENTRIES, _LEAST_ENTRIES = 256, 16
_MOST_GROUPS = 500
_TREND_NUMBERS, _MOST_TREND, _LEAST_TREND = 20_000, 400, 16
_SPREADS, _MOST_SPREAD, _LEAST_SPREAD = 2_000, 64, 8
_MOST_BOXES = 2_000
_TRENDS = ("mean", "std", "absmax")
_OF_BOX = ("mean", "std", "min", "max")
_OF_OVERFLOW = ("format", "count", "above", "below", "flushed", "below_scaled", "flushed_scaled")


def cells_data(plain: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the groups by quant type, tensor name and layer. `plain` is the report's document."""
    return [
        {**picked(row, *BY_LAYER, *NUMBERS), "errors": errors_of(row["errors"])}
        for row in grouped(plain, BY_LAYER)
    ]


def distributions_data(plain: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the groups by quant type and tensor name, with their quantiles and exponents."""
    return [
        {
            **picked(row, *BY_TENSOR, *NUMBERS),
            "quantiles": quantiles_of(row),
            "exponents": exponents_of(row),
            "errors": errors_of(row["errors"]),
        }
        for row in grouped(plain, BY_TENSOR)
    ]


def boxes_data(groups: Groups) -> list[dict[str, Any]]:
    """Return quantiles by quant type and layer, empty if no element was read."""
    rows = {place: tally_numbers(tally) for place, tally in by_layer(groups).items()}
    return [
        {"quant_type": one, "layer": layer, "quantiles": quantiles_of(row), **picked(row, *_OF_BOX)}
        for (one, layer), row in rows.items()
    ]


def tensor_boxes_data(plain: dict[str, Any], notes: Notes) -> list[dict[str, Any]]:
    """Return quantiles by quant type, tensor name and layer, empty if no element was read."""
    rows = [row for row in grouped(plain, BY_LAYER) if row["quantiles"] is not None]
    if len(rows) > _MOST_BOXES:
        notes.append({"about": "boxes", "found": len(rows), "shown": _MOST_BOXES})
    return [
        {**picked(row, *BY_LAYER, *_OF_BOX), "quantiles": quantiles_of(row)} for row in rows[:_MOST_BOXES]
    ]


def overflow_data(groups: Groups) -> list[dict[str, Any]]:
    """Return the values outside of each format's range, by quant type and tensor name, in counts."""
    return [
        {**dict(zip(BY_TENSOR, values, strict=True)), **picked(row, *_OF_OVERFLOW)}
        for values, tally in groups.by(*BY_TENSOR).items()
        if tally.distribution is not None
        for row in overflow_numbers(tally.distribution)
    ]


def channels_data(groups: Groups, notes: Notes) -> list[dict[str, Any]]:
    """Return channels by quant type, tensor name, layer and number of channels, most outliers first."""
    found = [
        (values, channels)
        for values, tally in groups.by(*BY_LAYER).items()
        for channels in tally.channels.values()
    ]
    found.sort(key=lambda one: -one[1].outlier_percent)
    if len(found) > _MOST_GROUPS:
        notes.append({"about": "channels", "found": len(found), "shown": _MOST_GROUPS})
    shown = found[:_MOST_GROUPS]
    entries = max(_LEAST_ENTRIES, min(_MOST_ENTRIES, _CHANNEL_NUMBERS // max(1, len(shown))))
    return [{**dict(zip(BY_LAYER, values, strict=True)), **_channels(one, entries)} for values, one in shown]


def _channels(channels: Channels, most: int) -> dict[str, Any]:
    together = -(-channels.amax.size // most)
    amax = np.maximum.reduceat(channels.amax, np.arange(0, channels.amax.size, together))
    numbers = channel_numbers(channels)
    return {
        **picked(numbers, "channels", "width", "outlier_percent", "amax_ratio"),
        "entries_per_point": together,
        "amax": rounded(amax.tolist()),
        "largest": [rounded([*each.values()]) for each in numbers["largest"]],
    }


def iterations_data(groups: Groups, notes: Notes) -> list[dict[str, Any]]:
    """Return trends by quant type and tensor name over the iterations. Many iterations are thinned evenly."""
    lines: dict[tuple[Value, Value], list[tuple[Value, Tally]]] = defaultdict(list)
    for (one, name, iteration), tally in groups.by(*BY_ITERATION).items():
        lines[one, name].append((iteration, tally))
    most = max(_LEAST_TREND, min(_MOST_TREND, _TREND_NUMBERS // max(1, len(lines))))
    if any(len(line) > most for line in lines.values()):
        notes.append({"about": "iterations", "shown": most})
    widest = max(_LEAST_SPREAD, min(_MOST_SPREAD, _SPREADS // max(1, len(lines))))
    return [_trend(values, line[:: -(-len(line) // most)], widest) for values, line in lines.items()]


def _trend(values: tuple[Value, Value], line: list[tuple[Value, Tally]], widest: int) -> dict[str, Any]:
    spread = line[:: -(-len(line) // widest)] if len(line) > 1 else []
    labels = dict.fromkeys(label for _, tally in line for label in tally.errors)
    return {
        **dict(zip(BY_TENSOR, values, strict=True)),
        "iteration": [iteration for iteration, _ in line],
        **{name: [rounded(getattr(tally.stats, name)) for _, tally in line] for name in _TRENDS},
        "spread": {
            "iteration": [iteration for iteration, _ in spread],
            "shares": [binades(tally.stats.exponent_histogram).tolist() for _, tally in spread],
        },
        "errors": {
            label: {
                metric: [
                    rounded(getattr(tally.errors[label], metric)) if label in tally.errors else None
                    for _, tally in line
                ]
                for metric in ("sqnr_db", "underflow_percent")
            }
            for label in labels
        },
    }


def hif8_groups(plain: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the groups by layer and sample, and by layer and rank, of HiFloat8's quant types, or else of all."""
    types = {row["quant_type"] for row in grouped(plain, BY_RANK)}
    wanted = {one for one in types if type_within_run(one).startswith("hifp8")} or types
    return {
        fields[-1]: [
            {**picked(row, *fields, *NUMBERS), "quantiles": quantiles_of(row)}
            for row in grouped(plain, fields)
            if row["quant_type"] in wanted
        ]
        for fields in (BY_SAMPLE, BY_RANK)
    }


def nonfinite_data(plain: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the groups by quant type, tensor name and layer that contain NaN or Inf."""
    return [
        picked(row, *BY_LAYER, "nan", "inf", "count")
        for row in grouped(plain, BY_LAYER)
        if row["nan"] or row["inf"]
    ]
