"""The maps of one quant type: statistics and quantiles of its values by layer and sample, and by layer and rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from capd.analyze.groups import Groups, Tally, Value, in_order
from capd.report.figures.style import MAPS, Page, label, numbers_on, panels_of, ticks_at
from capd.report.gather import BY_RANK, BY_SAMPLE
from capd.report.quantiles import QUANTILES, quantiles_of
from capd.store.documents.names import component

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Cells", "draw_map", "map_pages"]

_STATISTICS = ("mean", "std", "min", "max")
_MOST_ROWS, _MOST_COLUMNS = 16, 8
# A share of the larger end.
_LEAST_SPAN = 1e-3
_SHARES = (0.01, 0.25, 0.5, 0.75, 0.99)
_ACROSS = {"sample": BY_SAMPLE, "rank": BY_RANK}
Cells = Mapping[tuple[Value, ...], float | None]
"""The numbers of a map by layer and another field."""


def map_pages(groups: Groups) -> Iterator[Page]:
    """Yield two pages for each quant type. They have panels of quantiles if elements were read."""
    for one in groups.values("quant_type"):
        for across in _ACROSS:
            yield Page(f"layer_{across}_{component(str(one))}.png", partial(_page, groups, one, across))


def _page(groups: Groups, one: Value, across: str) -> Figure:
    tallies = groups.by(*_ACROSS[across], quant_type=one)
    panels = _panels(tallies)
    height = 3.0 if len({layer for layer, _ in tallies}) <= 32 else 3.8
    title = f"{label(one)}: values by layer and {across}"
    figure, axes = panels_of(title, len(panels), 3 if len(panels) > len(_STATISTICS) else 2, (4.2, height))
    for panel, (what, cells) in zip(axes, panels.items(), strict=True):
        draw_map(figure, panel, cells, what, f"{what} of the values", across, most_level=8)
    return figure


def _panels(tallies: Mapping[tuple[Value, ...], Tally]) -> dict[str, Cells]:
    """Return for each panel's title the number of each cell."""
    found: dict[str, Cells] = {
        name: {cell: getattr(tally.stats, name) for cell, tally in tallies.items()} for name in _STATISTICS
    }
    quantiles = {cell: quantiles_of(tally) for cell, tally in tallies.items()}
    if any(quantiles.values()):
        for share in _SHARES:
            at = QUANTILES.index(share)
            found[f"{100 * share:.0f} % quantile"] = {
                cell: None if known is None else known[at] for cell, known in quantiles.items()
            }
    return found


def draw_map(
    figure: Figure,
    panel: Axes,
    cells: Cells,
    title: str,
    what: str,
    across: str,
    *,
    most_level: int,
    scale: Iterable[float | None] | None = None,
    log: bool = False,
) -> None:
    """Draw a map with its colour bar. Small maps have numbers in their cells if `scale` is given.

    Args:
        figure: The figure.
        panel: The panel of the map.
        cells: The numbers of the map by layer and another field.
        title: The title of the panel.
        what: The label of the colour bar.
        across: The label of the x-axis.
        most_level: The most labels of the x-axis that are not turned.
        scale: The numbers that the colours span, None for the numbers of the map.
        log: Whether the colours show the logarithm. Then only numbers above 0 are drawn.
    """
    from matplotlib.colors import LogNorm, Normalize

    layers, others = (in_order({place[at] for place in cells}) for at in (0, 1))
    grid = np.array([[cells.get((layer, other)) for other in others] for layer in layers], np.float64)
    seen = np.array([*(cells.values() if scale is None else scale)], np.float64)
    seen = seen[np.isfinite(seen) & (seen > 0)] if log else seen[np.isfinite(seen)]
    masked = np.ma.masked_invalid(np.where(grid > 0, grid, np.nan) if log else grid)
    # This colour shows cells without a finite value or without a record.
    panel.set_facecolor("lightgrey")
    panel.grid(visible=False)
    norm = (LogNorm if log else Normalize)(*_ends(seen))
    image = panel.imshow(masked, cmap=MAPS, norm=norm, aspect="auto", interpolation="nearest")
    panel.set_xticks(*ticks_at(others), rotation=90 if len(others) > most_level else 0)
    panel.set_yticks(*ticks_at(layers))
    panel.set(title=title, xlabel=across, ylabel="layer")
    if masked.count():
        bar = figure.colorbar(image, ax=panel)
        bar.set_label(what)
        if not log:
            numbers_on(bar.ax.yaxis)
    if grid.shape[0] <= _MOST_ROWS and grid.shape[1] <= _MOST_COLUMNS and scale is not None:
        for (row, column), value in np.ndenumerate(grid):
            if np.isfinite(value):
                colour = "white" if norm(value) < 0.55 else "black"
                panel.text(column, row, f"{value:.3g}", ha="center", va="center", fontsize=7, color=colour)


def _ends(seen: NDArray[np.float64]) -> tuple[float, float]:
    """Return the span of the colours. It is widened around a single number, so that the bar has ticks."""
    low, high = (float(seen.min()), float(seen.max())) if seen.size else (1.0, 1.0)
    if high - low <= _LEAST_SPAN * max(abs(low), abs(high)):
        margin = 0.1 * max(abs(low), abs(high)) or 1.0
        low, high = low - margin, high + margin
    return low, high
