"""The page of overflow by format: the values above and below each format's range, by quant type and by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from capd.analyze.distribution import Distribution
from capd.analyze.grids import HIGH_PERCENT, MODERATE_PERCENT, Grid, grids, overflow_of
from capd.analyze.groups import Groups, Value
from capd.report.figures.layers import lines_by_layer
from capd.report.figures.style import Page, label, legend, new_figure, numbers_on
from capd.report.format_use import RANGES, overflow_by_type
from capd.report.gather import by_layer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["range_pages"]

_BY_LAYER = ("hifp8", "e4m3", "e5m2", "fp16")
_TABLES = {
    "above_percent": "above the largest value (%)",
    "below_percent": "below the smallest value (%)",
    "flushed_percent": "below the smallest normal value (%)",
}
_SCALED = "below the smallest value, one scale to amax (%)"
# None, low, moderate, high: the darker, the more severe.
_PALE = ("#f2f2f2", "#d4e6f1", "#fad7a0", "#e59866")


def range_pages(groups: Groups) -> Iterator[Page]:
    """Yield one page if elements were read."""
    if groups.whole().distribution is not None:
        yield Page("overflow_formats.png", partial(_page, groups))


def _page(groups: Groups) -> Figure:
    found = overflow_by_type(groups)
    height = max(2.9, 1.2 + 0.2 * len(found))
    figure, [tables, layers] = new_figure("Overflow and underflow by format", 2, 4, (4.2, height))
    for panel, (name, title) in zip(tables, _TABLES.items(), strict=False):
        _table(panel, {one: [getattr(each[0], name) for each in of.values()] for one, of in found.items()})
        panel.set_title(title)
    _table(tables[-1], {one: [each[1].below_percent for each in of.values()] for one, of in found.items()})
    tables[-1].set_title(_SCALED)
    _layers(layers, groups)
    legend(figure, layers)
    _severities(figure)
    return figure


def _table(panel: Axes, rows: Mapping[Value, Sequence[float | None]]) -> None:
    """Draw percentages as text, quant types down and formats across. The darker the ground, the more severe."""
    from matplotlib.colors import BoundaryNorm, ListedColormap

    grid = np.array([[0.0 if one is None else one for one in row] for row in rows.values()])
    norm = BoundaryNorm([0, np.nextafter(0, 1), MODERATE_PERCENT, HIGH_PERCENT, 100 + 1], len(_PALE))
    panel.imshow(grid, cmap=ListedColormap(_PALE), norm=norm, aspect="auto", interpolation="nearest")
    for (row, column), percent in np.ndenumerate(grid):
        panel.text(column, row, _percent(percent), ha="center", va="center", fontsize=8)
    panel.grid(visible=False)
    panel.set_xticks(range(len(RANGES)), RANGES)
    panel.set_yticks(range(len(rows)), [label(one) for one in rows])
    panel.set(xlabel="format", ylabel="quant type")


def _severities(figure: Figure) -> None:
    from matplotlib.patches import Patch

    low, high = f"{MODERATE_PERCENT:g} %", f"{HIGH_PERCENT:g} %"
    names = ("none", f"up to {low}", f"up to {high}", f"above {high}")
    patches = [
        Patch(facecolor=colour, edgecolor="grey", label=name)
        for colour, name in zip(_PALE, names, strict=True)
    ]
    figure.legend(handles=patches, title="share of the elements", loc="outside lower right", ncols=4)


def _percent(percent: float) -> str:
    return "0" if not percent else "<0.001" if percent < 0.001 else f"{percent:.3g}"


def _layers(panels: Sequence[Axes], groups: Groups) -> None:
    of_layers = by_layer(groups)
    for panel, name in zip(panels, _BY_LAYER, strict=True):
        numbers = {place: _outside(tally.distribution, grids()[name]) for place, tally in of_layers.items()}
        lines_by_layer(panel, groups, numbers)
        panel.set(title=f"outside of {name}, by layer", ylabel="above or below (% of the elements)")
        most = max((float(np.max(line.get_ydata())) for line in panel.lines), default=0.0)
        panel.set_ylim(0, 1.08 * most or 1)
        numbers_on(panel.yaxis)


def _outside(distribution: Distribution | None, grid: Grid) -> float | None:
    if distribution is None:
        return None
    found = overflow_of(distribution, grid)
    return 100 * (found.above + found.below) / found.count if found.count else None
