"""The page of boxes: the spread of a statistic across the layers, by quant type and tensor name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from capd.analyze.groups import Groups, Value
from capd.report.figures.style import (
    Page,
    drawable,
    label,
    log_values,
    new_figure,
    numbers_on,
    paged,
    say,
    style,
    ticks_at,
)
from capd.report.gather import BY_LAYER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["box_pages", "boxes", "grouped_boxes"]

_STATISTICS = ("mean", "std", "absmax")
_ROWS = 4
# Up to this number, the layers are drawn as points, too.
_FEW = 40


def box_pages(groups: Groups, *, log: bool = False) -> Iterator[Page]:
    """Yield pages of mean, std and absmax across the layers, with four tensor names each. None for a single layer."""
    if len(groups.values(BY_LAYER, "layer")) < 2:
        return
    for file, names in paged(groups.values(BY_LAYER, "tensor_name"), _ROWS, "boxes_by_type"):
        yield Page(file, partial(_page, groups, names, log))


def _page(groups: Groups, names: Sequence[Value], log: bool) -> Figure:
    figure, axes = new_figure("Statistics across layers", len(names), len(_STATISTICS), (4.0, 2.5))
    found, types = groups.by(*BY_LAYER), groups.values(BY_LAYER, "quant_type")
    for row, name in zip(axes, names, strict=True):
        for panel, statistic in zip(row, _STATISTICS, strict=True):
            of_types = {
                one: [
                    getattr(tally.stats, statistic)
                    for (each, tensor, _), tally in found.items()
                    if (each, tensor) == (one, name)
                ]
                for one in types
            }
            boxes(panel, of_types)
            panel.set_title(f"{label(name)}: {statistic}")
            panel.set_ylabel(f"{statistic}, a layer each")
            if log:
                log_values(panel)
            else:
                numbers_on(panel.yaxis)
    return figure


def boxes(panel: Axes, of_types: dict[Value, list[float | None]]) -> None:
    """Draw a box for each quant type: quartiles, median, whiskers to 1.5 of the box, and few numbers as points, too.

    Numbers that are not finite are left out.
    """
    for place, values in enumerate(of_types.values()):
        _box(panel, values, place, 0.6, place)
    if not panel.has_data():
        say(panel, "no finite value")
    panel.set_xticks(*ticks_at(list(of_types)), rotation=90 if len(of_types) > 6 else 0)
    panel.set_xlim(-0.6, len(of_types) - 0.4)
    panel.set_xlabel("quant type")
    panel.grid(visible=False, axis="x")


def grouped_boxes(
    panel: Axes, formats: Sequence[str], of_types: Mapping[Value, Mapping[str, list[float | None]]]
) -> None:
    """Draw the boxes of `boxes` for each format, with the quant types next to each other."""
    step = 0.8 / max(1, len(of_types))
    for number, (one, of_formats) in enumerate(of_types.items()):
        for place, name in enumerate(formats):
            at = place - 0.4 + step * (number + 0.5)
            _box(panel, of_formats[name], at, 0.8 * step, number, label(one))
    if not panel.has_data():
        say(panel, "no finite value")
    panel.set_xticks(
        range(len(formats)), [label(name) for name in formats], rotation=20 if len(formats) > 4 else 0
    )
    panel.set_xlim(-0.6, len(formats) - 0.4)
    panel.set_xlabel("format")
    panel.grid(visible=False, axis="x")


def _box(
    panel: Axes, values: Sequence[float | None], place: float, width: float, number: int, text: str = ""
) -> None:
    kept = [value for value in values if drawable(value)]
    if not kept:
        return
    look = style(number)
    drawn = panel.boxplot(
        [kept],
        positions=[place],
        widths=width,
        showfliers=len(kept) > _FEW,
        patch_artist=True,
        manage_ticks=False,
        boxprops={"facecolor": (*_rgb(look["color"]), 0.35), "edgecolor": look["color"]},
        medianprops={"color": "black"},
        flierprops={"markersize": 3},
    )
    drawn["boxes"][0].set_label(text or None)
    if len(kept) <= _FEW:
        spread = place + 0.6 * width * (np.arange(len(kept)) / max(1, len(kept) - 1) - 0.5)
        panel.plot(spread, kept, color=look["color"], marker=look["marker"], linestyle="none", markersize=3)


def _rgb(colour: str) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    return to_rgb(colour)
