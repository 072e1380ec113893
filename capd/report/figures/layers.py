"""The page of statistics against the layer: a row of panels for each tensor name, a line for each quant type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from capd.analyze.groups import Groups, Value
from capd.report.figures.style import (
    Page,
    drawable,
    label,
    legend,
    log_values,
    new_figure,
    numbers_on,
    paged,
    place_layers,
    say,
    style,
)
from capd.report.gather import BY_LAYER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["layer_pages", "line_by_layer"]

_STATISTICS = ("mean", "std", "absmax")
_ROWS = 4


def layer_pages(groups: Groups, *, log: bool = False) -> Iterator[Page]:
    """Yield pages of mean, std and absmax by layer, with four tensor names each."""
    for file, names in paged(groups.values(BY_LAYER, "tensor_name"), _ROWS, "statistics_by_layer"):
        yield Page(file, partial(_page, groups, names, log))


def _page(groups: Groups, names: Sequence[Value], log: bool) -> Figure:
    figure, axes = new_figure("Statistics by layer", len(names), len(_STATISTICS), (4.4, 2.5))
    found, types = groups.by(*BY_LAYER), groups.values(BY_LAYER, "quant_type")
    for row, name in zip(axes, names, strict=True):
        of_name = {
            (one, layer): tally.stats for (one, tensor, layer), tally in found.items() if tensor == name
        }
        layers = [
            layer for layer in groups.values(BY_LAYER, "layer") if any(key[1] == layer for key in of_name)
        ]
        for panel, statistic in zip(row, _STATISTICS, strict=True):
            for number, one in enumerate(types):
                numbers = [
                    getattr(of_name[one, layer], statistic) if (one, layer) in of_name else None
                    for layer in layers
                ]
                line_by_layer(panel, layers, numbers, number, label(one))
            panel.set_title(f"{label(name)}: {statistic}")
            panel.set_ylabel(f"{statistic} of the values")
            if log:
                log_values(panel)
            else:
                numbers_on(panel.yaxis)
            if not panel.lines:
                say(panel, "no finite value")
    legend(figure, [panel for row in axes for panel in row])
    return figure


def line_by_layer(
    panel: Axes, layers: Sequence[Value], numbers: Sequence[float | None], number: int, text: str
) -> None:
    """Draw a line over the layers, with gaps for missing numbers. Values without a layer are drawn apart from it."""
    places = [place for place, value in enumerate(numbers) if drawable(value)]
    look = {**style(number), "markersize": 3.5 if len(layers) <= 32 else 2, "linewidth": 1.2}
    apart = [place for place in places if layers[place] is None]
    of_layers = [place for place in places if layers[place] is not None]
    for some, more in ((of_layers, {}), (apart, {"linestyle": "none"})):
        if some:
            panel.plot(some, [numbers[place] for place in some], label=text, **{**look, **more})  # type: ignore[arg-type]
    place_layers(panel, layers)
