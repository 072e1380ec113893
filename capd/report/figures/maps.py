"""The maps of one quant type: statistics and quantiles of its values by layer and sample, and by layer and rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from capd.analyze.groups import Fields, Groups, Tally, Value
from capd.report.figures.style import MAPS, Page, label, new_figure, numbers_on, ticks_at
from capd.report.gather import BY_RANK, BY_SAMPLE
from capd.report.quantiles import QUANTILES, quantiles_of
from capd.store.documents.names import component

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_map", "map_pages"]

_STATISTICS = ("mean", "std", "min", "max")
_MOST_ROWS, _MOST_COLUMNS = 16, 8
# A share of the larger end.
_LEAST_SPAN = 1e-3
_SHARES = (0.01, 0.25, 0.5, 0.75, 0.99)
_MAPS = {"sample": (BY_SAMPLE, "sample_idx"), "rank": (BY_RANK, "rank")}


def map_pages(groups: Groups) -> Iterator[Page]:
    """Yield two pages for each quant type. They have panels of quantiles if elements were read."""
    for one in groups.values(BY_RANK, "quant_type"):
        for across, (fields, name) in _MAPS.items():
            yield Page(
                f"layer_{across}_{component(str(one))}.png", partial(_page, groups, one, across, fields, name)
            )


def _page(groups: Groups, one: Value, across: str, fields: Fields, name: str) -> Figure:
    places = [fields.index("layer"), fields.index(name)]
    cells = {
        tuple(values[place] for place in places): tally
        for values, tally in groups.by(*fields).items()
        if values[0] == one
    }
    layers, others = (
        [value for value in groups.values(fields, field) if any(cell[at] == value for cell in cells)]
        for at, field in enumerate(("layer", name))
    )
    panels = _panels(cells)
    columns = 3 if len(panels) > len(_STATISTICS) else 2
    rows = -(-len(panels) // columns)
    title = f"{label(one)}: values by layer and {across}"
    figure, axes = new_figure(title, rows, columns, (4.2, 3.0 if len(layers) <= 32 else 3.8))
    flat = [panel for row in axes for panel in row]
    for panel, (what, numbers) in zip(flat, panels.items(), strict=False):
        grid = np.full((len(layers), len(others)), np.nan)
        for (layer, other), number in numbers.items():
            grid[layers.index(layer), others.index(other)] = np.nan if number is None else number
        draw_map(figure, panel, grid, what, f"{what} of the values")
        panel.set_xticks(*ticks_at(others), rotation=90 if len(others) > 8 else 0)
        panel.set_yticks(*ticks_at(layers))
        panel.set_xlabel(across)
        panel.set_ylabel("layer")
    for panel in flat[len(panels) :]:
        panel.remove()
    return figure


def _panels(
    cells: Mapping[tuple[Value, ...], Tally],
) -> dict[str, dict[tuple[Value, ...], float | None]]:
    """Return for each panel's title the number of each cell."""
    found: dict[str, dict[tuple[Value, ...], float | None]] = {
        name: {cell: getattr(tally.stats, name) for cell, tally in cells.items()} for name in _STATISTICS
    }
    quantiles = {cell: quantiles_of(tally) for cell, tally in cells.items()}
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
    grid: NDArray[np.float64],
    title: str,
    what: str,
    *,
    scale: NDArray[np.float64] | None = None,
    log: bool = False,
) -> None:
    """Draw a map with its colour bar. Small maps have numbers in their cells if `scale` is given.

    Args:
        figure: The figure.
        panel: The panel of the map.
        grid: The numbers of the map.
        title: The title of the panel.
        what: The label of the colour bar.
        scale: The numbers that the colours span, None for the numbers of the grid.
        log: Whether the colours show the logarithm. Then only numbers above 0 are drawn.
    """
    from matplotlib.colors import LogNorm, Normalize

    seen = grid if scale is None else scale
    seen = seen[np.isfinite(seen) & (seen > 0)] if log else seen[np.isfinite(seen)]
    masked = np.ma.masked_invalid(np.where(grid > 0, grid, np.nan) if log else grid)
    # This colour shows cells without a finite value or without a record.
    panel.set_facecolor("lightgrey")
    panel.grid(visible=False)
    norm = (LogNorm if log else Normalize)(*_ends(seen))
    image = panel.imshow(masked, cmap=MAPS, norm=norm, aspect="auto", interpolation="nearest")
    panel.set_title(title)
    if masked.count():
        bar = figure.colorbar(image, ax=panel)
        bar.set_label(what)
        if not log:
            numbers_on(bar.ax.yaxis)
    if grid.shape[0] <= _MOST_ROWS and grid.shape[1] <= _MOST_COLUMNS and scale is not None:
        for (row, column), value in np.ndenumerate(grid):
            if np.isfinite(value):
                dark = norm(value) < 0.55
                colour = "white" if dark else "black"
                panel.text(column, row, f"{value:.3g}", ha="center", va="center", fontsize=7, color=colour)


def _ends(seen: NDArray[np.float64]) -> tuple[float, float]:
    """Return the span of the colours. It is widened around a single number, so that the bar has ticks."""
    low, high = (float(seen.min()), float(seen.max())) if seen.size else (1.0, 1.0)
    if high - low <= _LEAST_SPAN * max(abs(low), abs(high)):
        margin = 0.1 * max(abs(low), abs(high)) or 1.0
        low, high = low - margin, high + margin
    return low, high
