"""The pages of mean, std and absmax: by layer, by iteration, and as boxes across the layers.

Each has a row of panels for each tensor name, and distinguishes the quant types. The axes of values are logarithmic if
`log` is set, linear if it is not, and logarithmic for gradients alone if it is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from capd.analyze.groups import Groups, Value, in_order
from capd.analyze.verdict.roles import is_gradient
from capd.report.figures.boxes import boxes
from capd.report.figures.layers import lines_by_layer
from capd.report.figures.style import (
    Page,
    drawable,
    label,
    legend,
    new_figure,
    numbers_on,
    paged,
    style,
    value_axis,
)
from capd.report.gather import BY_ITERATION, BY_LAYER
from capd_client.process.text import human_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["box_pages", "draw_trend", "iteration_pages", "layer_pages"]

_STATISTICS = ("mean", "std", "absmax")
_ROWS = 4
# Draws one statistic of one tensor name.
Draw = Callable[["Axes", Groups, Value, str], None]


def layer_pages(groups: Groups, *, log: bool | None = None) -> Iterator[Page]:
    """Yield pages by layer, with four tensor names each."""
    return _pages(groups, "statistics_by_layer", "Statistics by layer", _by_layer, log)


def iteration_pages(groups: Groups, *, log: bool | None = None) -> Iterator[Page]:
    """Yield pages by iteration, with four tensor names each. Nothing if no record says its iteration."""
    if any(iteration is not None for iteration in groups.values("iteration")):
        yield from _pages(groups, "statistics_by_iteration", "Statistics by iteration", draw_trend, log)


def box_pages(groups: Groups, *, log: bool | None = None) -> Iterator[Page]:
    """Yield pages of the spread across the layers, with four tensor names each. None for a single layer."""
    if len(groups.values("layer")) > 1:
        yield from _pages(groups, "boxes_by_type", "Statistics across layers", _across_layers, log, 4.0)


def _pages(
    groups: Groups, file: str, title: str, draw: Draw, log: bool | None, width: float = 4.4
) -> Iterator[Page]:
    for name, some in paged(groups.values("tensor_name"), _ROWS, file):
        yield Page(name, partial(_page, groups, some, title, draw, log, width))


def _page(
    groups: Groups, names: Sequence[Value], title: str, draw: Draw, log: bool | None, width: float
) -> Figure:
    figure, axes = new_figure(title, len(names), len(_STATISTICS), (width, 2.5))
    for row, name in zip(axes, names, strict=True):
        for panel, statistic in zip(row, _STATISTICS, strict=True):
            draw(panel, groups, name, statistic)
            panel.set_title(f"{label(name)}: {statistic}")
            value_axis(panel, log=is_gradient(name) if log is None else log)
    legend(figure, figure.axes)
    return figure


def _by_layer(panel: Axes, groups: Groups, name: Value, statistic: str) -> None:
    of_name = groups.by(*BY_LAYER, tensor_name=name)
    numbers = {place: getattr(tally.stats, statistic) for place, tally in of_name.items()}
    lines_by_layer(panel, groups, numbers, in_order({layer for _, layer in of_name}))
    panel.set_ylabel(f"{statistic} of the values")


def draw_trend(panel: Axes, groups: Groups, name: Value, statistic: str) -> None:
    """Draw lines of one statistic of one tensor name against the iteration, or bars with numbers of a single one."""
    iterations = [iteration for _, iteration in groups.by(*BY_ITERATION, tensor_name=name)]
    if len({*iterations}) == 1:
        _single(panel, groups, name, statistic, iterations[0])
        return
    for number, one in enumerate(groups.values("quant_type")):
        found = groups.by(*BY_ITERATION, quant_type=one, tensor_name=name)
        points = [
            (iteration, value)
            for (iteration,), tally in found.items()
            if drawable(value := getattr(tally.stats, statistic))
        ]
        if points:
            look = {**style(number), "markersize": 3 if len(points) <= 64 else 0, "linewidth": 1.2}
            panel.plot(*zip(*points, strict=True), label=label(one), **look)
    panel.set(xlabel="iteration", ylabel=f"{statistic} of the values")
    numbers_on(panel.xaxis, whole=True)


def _single(panel: Axes, groups: Groups, name: Value, statistic: str, iteration: Value) -> None:
    """Draw a bar with its number for each quant type, because a line of one point would show nothing."""
    types = groups.values("quant_type")
    found = groups.by(*BY_ITERATION, tensor_name=name, iteration=iteration)
    values = [getattr(found[one,].stats, statistic) if (one,) in found else None for one in types]
    drawn = panel.bar(
        range(len(types)),
        [value if drawable(value) else 0.0 for value in values],
        color=[style(number)["color"] for number in range(len(types))],
    )
    panel.bar_label(drawn, ["-" if value is None else f"{value:.4g}" for value in values], padding=2)
    panel.set_xticks(range(len(types)), [label(one) for one in types])
    panel.margins(y=0.15)
    panel.set(xlabel=f"iteration {human_value(iteration)}, the only one", ylabel=f"{statistic} of the values")


def _across_layers(panel: Axes, groups: Groups, name: Value, statistic: str) -> None:
    boxes(
        panel,
        {
            one: [
                getattr(tally.stats, statistic)
                for tally in groups.by(*BY_LAYER, quant_type=one, tensor_name=name).values()
            ]
            for one in groups.values("quant_type")
        },
    )
    panel.set_ylabel(f"{statistic}, a layer each")
