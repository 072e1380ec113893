"""The overflow page: the share of NaN, of Inf and of zeros, by quant type and against the layer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from capd.analyze.groups import Groups
from capd.report.figures.layers import lines_by_layer
from capd.report.figures.style import Page, bars_by_type, legend, new_figure, numbers_on
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
    types, by_layer = groups.values("quant_type"), groups.by(*BY_TYPE_AND_LAYER)
    height = max(2.3, 0.5 * len(types))
    figure, axes = new_figure("Overflow: NaN, Inf and zeros", len(_KINDS), 2, (5.2, height))
    for (left, right), (kind, shown) in zip(axes, _KINDS.items(), strict=True):
        stats = [tally.stats for tally in groups.by("quant_type").values()]
        shares = [_percent(each, kind) or 0.0 for each in stats]
        texts = [f"{human_count(getattr(each, kind))} of {human_count(each.count)}" for each in stats]
        bars_by_type(left, types, shares, texts, 2)
        share = f"{shown} (% of the elements)"
        left.set(title=f"{shown} by quant type", xlabel=share, ylabel="quant type")
        numbers_on(left.xaxis)
        lines_by_layer(right, groups, {place: _percent(each.stats, kind) for place, each in by_layer.items()})
        right.set(title=f"{shown} by layer", ylabel=share)
        right.set_ylim(bottom=0, top=None if any(shares) else 1)
        numbers_on(right.yaxis)
    legend(figure, [row[1] for row in axes])
    return figure


def _percent(stats: Stats, kind: str) -> float | None:
    return 100 * getattr(stats, kind) / stats.count if stats.count else None
