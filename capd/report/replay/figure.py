"""The figure of a replay: SQNR by layer, one panel for each product and one line for each recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from capd.report.figures.style import (
    Page,
    drawable,
    label,
    legend,
    panels_of,
    say,
    style,
    ticks_at,
    value_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["replay_page"]

_TITLES = {"y": "Y = X Wᵀ", "dx": "dX = dY W", "dw": "dW = dYᵀ X"}
Row = Mapping[str, Any]


def replay_page(document: Row) -> Page:
    """Return the page of a replay's document (`capd.replay.document`)."""
    return Page("replay.png", partial(_figure, document))


def _figure(document: Row) -> Figure:
    layers: Sequence[Row] = document["layers"]
    products: Sequence[str] = document["products"]
    numbers = list(dict.fromkeys(one["layer"] for one in layers))
    types = list(dict.fromkeys(one["quant_type"] for one in layers))
    figure, panels = panels_of("Products in each recipe", len(products), 3, (4.2, 3.2))
    for panel, product in zip(panels, products, strict=True):
        for at, (recipe, quant_type) in enumerate(
            (one["name"], each) for one in document["recipes"] for each in types
        ):
            found = {
                numbers.index(one["layer"]): one["recipes"].get(recipe, {}).get(product, {}).get("sqnr_db")
                for one in layers
                if one["quant_type"] == quant_type
            }
            name = recipe if len(types) == 1 else f"{recipe}, {quant_type}"
            _line(panel, name, at, numbers, found)
        panel.set(title=_TITLES[product], xlabel="layer", ylabel="SQNR (dB)", xlim=(-0.5, len(numbers) - 0.5))
        panel.set_xticks(*ticks_at(numbers))
        if panel.has_data():
            value_axis(panel, log=False)
        else:
            say(panel, "no product has an error")
    legend(figure, panels, "recipe")
    return figure


def _line(panel: Axes, name: str, at: int, layers: Sequence[Any], found: Mapping[int, float | None]) -> None:
    """Draw the line of a recipe. A product outside of layers is drawn apart from it."""
    drawn = {place: value for place, value in found.items() if drawable(value)}
    look = {**style(at), "markersize": 3.5 if len(layers) <= 32 else 2, "linewidth": 1.2}
    for apart in (False, True):
        some = {place: value for place, value in drawn.items() if (layers[place] is None) is apart}
        if some:
            extra = {"linestyle": "none"} if apart else {}
            panel.plot(list(some), list(some.values()), label=label(name), **{**look, **extra})
