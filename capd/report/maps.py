"""Maps of one quant type: statistics and quantiles of its values by layer and sample, and by layer and rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from capd.analyze.groups import Fields, Groups, Tally, Value
from capd.report.document import QUANTILES, quantiles_of
from capd.report.figures import MAPS, Page, label, new_figure, numbers_on, ticks_at
from capd.report.gather import BY_RANK, BY_SAMPLE
from capd.store.names import component

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["map_pages"]

_STATISTICS = ("mean", "std", "min", "max")
_SHARES = (0.01, 0.25, 0.5, 0.75, 0.99)
_MAPS = {"sample": (BY_SAMPLE, "sample_idx"), "rank": (BY_RANK, "rank")}


def map_pages(groups: Groups) -> Iterator[Page]:
    """Two pages for each quant type; panels of quantiles where elements were read."""
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
        _map(figure, panel, grid, what)
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
    """By the panel's title its number in each cell."""
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


def _map(figure: Figure, panel: Axes, grid: NDArray[np.float64], what: str) -> None:
    masked = np.ma.masked_invalid(grid)
    panel.set_facecolor("lightgrey")  # no finite value, or no record
    panel.grid(visible=False)
    image = panel.imshow(masked, cmap=MAPS, aspect="auto", interpolation="nearest")
    panel.set_title(what)
    if masked.count():
        bar = figure.colorbar(image, ax=panel)
        bar.set_label(f"{what} of the values")
        numbers_on(bar.ax.yaxis)
