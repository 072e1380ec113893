"""The overflow page: the share of NaN, of Inf and of zeros, by quant type and against the layer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from capd.analyze.groups import Groups
from capd.report.figures.layers import line_by_layer
from capd.report.figures.style import Page, label, legend, new_figure, numbers_on, style
from capd.report.gather import BY_TYPE_AND_LAYER
from capd.store.format.statistics import Stats
from capd_client.process.text import human_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["overflow_pages"]

_KINDS = {"nan": "NaN", "inf": "Inf", "zero": "zero"}


def overflow_pages(groups: Groups) -> Iterator[Page]:
    """One page."""
    yield Page("overflow.png", partial(_page, groups))


def _page(groups: Groups) -> Figure:
    types = groups.values(BY_TYPE_AND_LAYER, "quant_type")
    layers = groups.values(BY_TYPE_AND_LAYER, "layer")
    figure, axes = new_figure(
        "Overflow: NaN, Inf and zeros", len(_KINDS), 2, (5.2, max(2.3, 0.5 * len(types)))
    )
    by_layer = groups.by(*BY_TYPE_AND_LAYER)
    for (left, right), (kind, shown) in zip(axes, _KINDS.items(), strict=True):
        stats = [groups.by("quant_type")[one,].stats for one in types]
        shares = [_percent(each, kind) or 0.0 for each in stats]
        bars = left.barh(
            range(len(types)), shares, color=[style(number)["color"] for number in range(len(types))]
        )
        left.bar_label(
            bars,
            [f"{human_count(getattr(each, kind))} of {human_count(each.count)}" for each in stats],
            padding=3,
        )
        left.set_xlim(0, 2 * max(shares) or 1)
        left.set_yticks(range(len(types)), [label(one) for one in types])
        left.invert_yaxis()
        left.set_ylabel("quant type")
        left.set_title(f"{shown} by quant type")
        left.set_xlabel(f"{shown} (% of the elements)")
        for number, one in enumerate(types):
            of_type = [by_layer.get((one, layer)) for layer in layers]
            numbers = [None if each is None else _percent(each.stats, kind) for each in of_type]
            line_by_layer(right, layers, numbers, number, label(one))
        right.set_title(f"{shown} by layer")
        right.set_ylabel(f"{shown} (% of the elements)")
        right.set_ylim(bottom=0, top=None if any(shares) else 1)
        numbers_on(left.xaxis)
        numbers_on(right.yaxis)
    legend(figure, [row[1] for row in axes])
    return figure


def _percent(stats: Stats, kind: str) -> float | None:
    return 100 * getattr(stats, kind) / stats.count if stats.count else None
