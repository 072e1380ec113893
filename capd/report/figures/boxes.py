"""Boxes of the spread of some numbers: quartiles, median, whiskers to 1.5 of the box, and few numbers as points, too.

Numbers that are not finite are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from capd.analyze.groups import Value
from capd.report.figures.style import drawable, label, style, ticks_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["boxes", "grouped_boxes"]

# Up to this number, the numbers of a box are drawn as points, too.
_FEW = 40


def boxes(panel: Axes, of_types: Mapping[Value, Sequence[float | None]]) -> None:
    """Draw a box for each quant type."""
    for place, values in enumerate(of_types.values()):
        _box(panel, values, place, 0.6, place)
    panel.set_xticks(*ticks_at(list(of_types)), rotation=90 if len(of_types) > 6 else 0)
    panel.set(xlim=(-0.6, len(of_types) - 0.4), xlabel="quant type")
    panel.grid(visible=False, axis="x")


def grouped_boxes(
    panel: Axes, formats: Sequence[str], of_types: Mapping[Value, Mapping[str, Sequence[float | None]]]
) -> None:
    """Draw the boxes of each format, with the quant types next to each other."""
    step = 0.8 / max(1, len(of_types))
    for number, (one, of_formats) in enumerate(of_types.items()):
        for place, name in enumerate(formats):
            at = place - 0.4 + step * (number + 0.5)
            _box(panel, of_formats[name], at, 0.8 * step, number, label(one))
    panel.set_xticks(range(len(formats)), map(label, formats), rotation=20 if len(formats) > 4 else 0)
    panel.set(xlim=(-0.6, len(formats) - 0.4), xlabel="format")
    panel.grid(visible=False, axis="x")


def _box(
    panel: Axes, values: Sequence[float | None], place: float, width: float, number: int, text: str = ""
) -> None:
    shown = [value for value in values if drawable(value)]
    if not shown:
        return
    look = style(number)
    drawn = panel.boxplot(
        [shown],
        positions=[place],
        widths=width,
        showfliers=len(shown) > _FEW,
        patch_artist=True,
        manage_ticks=False,
        boxprops={"facecolor": (look["color"], 0.35), "edgecolor": look["color"]},
        medianprops={"color": "black"},
        flierprops={"markersize": 3},
    )
    drawn["boxes"][0].set_label(text or None)
    if len(shown) <= _FEW:
        spread = place + 0.6 * width * (np.arange(len(shown)) / max(1, len(shown) - 1) - 0.5)
        panel.plot(spread, shown, color=look["color"], marker=look["marker"], linestyle="none", markersize=3)
