"""The page of statistics against the iteration: a row of panels for each tensor name, a line for each quant type."""

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
    say,
    style,
)
from capd.report.gather import BY_ITERATION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_trend", "iteration_pages"]

_STATISTICS = ("mean", "std", "absmax")
_ROWS = 4


def iteration_pages(groups: Groups, *, log: bool = False) -> Iterator[Page]:
    """Yield pages of mean, std and absmax by iteration, with four tensor names each. None for a single iteration."""
    if len(groups.values(BY_ITERATION, "iteration")) < 2:
        return
    for file, names in paged(groups.values(BY_ITERATION, "tensor_name"), _ROWS, "statistics_by_iteration"):
        yield Page(file, partial(_page, groups, names, log))


def _page(groups: Groups, names: Sequence[Value], log: bool) -> Figure:
    figure, axes = new_figure("Statistics by iteration", len(names), len(_STATISTICS), (4.4, 2.5))
    for row, name in zip(axes, names, strict=True):
        for panel, statistic in zip(row, _STATISTICS, strict=True):
            draw_trend(panel, groups, name, statistic, log=log)
            panel.set_title(f"{label(name)}: {statistic}")
    legend(figure, [panel for row in axes for panel in row])
    return figure


def draw_trend(panel: Axes, groups: Groups, name: Value, statistic: str, *, log: bool) -> None:
    """Draw lines of one statistic of one tensor name against the iteration."""
    found = groups.by(*BY_ITERATION)
    for number, one in enumerate(groups.values(BY_ITERATION, "quant_type")):
        points = [
            (iteration, value)
            for (each, tensor, iteration), tally in found.items()
            if (each, tensor) == (one, name) and drawable(value := getattr(tally.stats, statistic))
        ]
        if points:
            look = {**style(number), "markersize": 3 if len(points) <= 64 else 0, "linewidth": 1.2}
            panel.plot(*zip(*points, strict=True), label=label(one), **look)
    panel.set_xlabel("iteration")
    panel.set_ylabel(f"{statistic} of the values")
    numbers_on(panel.xaxis, whole=True)
    if log:
        log_values(panel)
    else:
        numbers_on(panel.yaxis)
    if not panel.lines:
        say(panel, "no finite value")
