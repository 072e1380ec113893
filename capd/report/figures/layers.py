"""Lines over the layers, one for each quant type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from capd.analyze.groups import Groups, Value
from capd.report.figures.style import drawable, label, style, ticks_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["lines_by_layer"]


def lines_by_layer(
    panel: Axes,
    groups: Groups,
    numbers: Mapping[tuple[Value, ...], float | None],
    layers: Sequence[Value] | None = None,
) -> None:
    """Draw a line for each quant type, with gaps for missing numbers. Numbers without a layer are drawn apart from it.

    `numbers` has them by quant type and layer. `layers` are those of the x-axis, None for all.
    """
    layers = groups.values("layer") if layers is None else layers
    for number, one in enumerate(groups.values("quant_type")):
        found = {place: numbers.get((one, layer)) for place, layer in enumerate(layers)}
        drawn = {place: value for place, value in found.items() if drawable(value)}
        look = {**style(number), "markersize": 3.5 if len(layers) <= 32 else 2, "linewidth": 1.2}
        for apart in (False, True):
            some = {place: value for place, value in drawn.items() if (layers[place] is None) is apart}
            if some:
                look |= {"linestyle": "none"} if apart else {}
                panel.plot(list(some), list(some.values()), label=label(one), **look)
    panel.set_xticks(*ticks_at(layers))
    panel.set(xlim=(-0.5, len(layers) - 0.5), xlabel="layer")
