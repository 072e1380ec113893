"""The pages of metrics: lines over the steps, one for each label, and histograms of the scales of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from capd.analyze.groups import Fields, Value, order_of
from capd.analyze.trends.block_scales import BlockScaleCounts
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
from capd.report.trends.gather import TrendGroups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["trend_pages"]

_ROWS = 4
_FEW_POINTS = 64
Values = tuple[Value, ...]


def trend_pages(groups: TrendGroups, fields: Fields, *, log: bool = False) -> Iterator[Page]:
    """Yield pages of one kind, with four groups each: a row of panels for each group, a line for each label."""
    values = sorted(dict.fromkeys(values for values, _ in groups.groups), key=order_of)
    for name, some in paged(values, _ROWS, groups.kind.name.replace("-", "_")):
        yield Page(name, partial(_page, groups, fields, some, log))


def _page(groups: TrendGroups, fields: Fields, some: Sequence[Values], log: bool) -> Figure:
    has_scales = any(
        isinstance(next(iter(steps.values())), BlockScaleCounts) for steps in groups.groups.values()
    )
    plotted = groups.kind.plotted
    figure, axes = new_figure(groups.kind.title, len(some), len(plotted) + has_scales, (4.0, 2.5))
    labels = {text: number for number, text in enumerate(dict.fromkeys(text for _, text in groups.groups))}
    for row, values in zip(axes, some, strict=True):
        place = ", ".join(map(label, values)) if fields else "all"
        for panel, name in zip(row, plotted, strict=False):
            _lines(panel, groups, values, labels, name, log=log)
            panel.set_title(f"{place}: {_title(name)}")
        if has_scales:
            _histogram(row[-1], groups, values, labels)
            row[-1].set_title(f"{place}: scales")
    legend(figure, figure.axes, title="")
    return figure


def _lines(
    panel: Axes, groups: TrendGroups, values: Values, labels: Mapping[str, int], name: str, *, log: bool
) -> None:
    for text, number in labels.items():
        steps = sorted(groups.groups.get((values, text), {}).items())
        points = [
            (step, value) for step, sums in steps if drawable(value := sums.numbers()[name])
        ]  # fmt: skip
        if points:
            look = {**style(number), "linewidth": 1.2, "markersize": 3 if len(points) <= _FEW_POINTS else 0}
            panel.plot(*zip(*points, strict=True), label=label(text) if text else None, **look)
    if not panel.has_data():
        say(panel, "no number")
        return
    if name in groups.kind.lines:
        level, meaning = groups.kind.lines[name]
        panel.axhline(level, color="0.4", linestyle=(0, (4, 3)), linewidth=1, label=meaning)
    panel.set(xlabel="iteration", ylabel=_title(name))
    numbers_on(panel.xaxis, whole=True)
    if log:
        log_values(panel)
    else:
        numbers_on(panel.yaxis)


def _histogram(panel: Axes, groups: TrendGroups, values: Values, labels: Mapping[str, int]) -> None:
    """Draw the share of blocks by the binary exponent of their scale, over all steps."""
    for text, number in labels.items():
        if (values, text) not in groups.groups:
            continue
        sums = groups.whole((values, text))
        shares = _exponents(sums) if isinstance(sums, BlockScaleCounts) else {}
        if shares:
            look = {**style(number), "markersize": 3, "linewidth": 1.2, "drawstyle": "steps-mid"}
            panel.plot(list(shares), list(shares.values()), label=label(text), **look)
    if not panel.has_data():
        say(panel, "no scale")
        return
    panel.set(xlabel="floor(log2(scale))", ylabel="% of the blocks")
    numbers_on(panel.xaxis, whole=True)


def _exponents(sums: BlockScaleCounts) -> dict[int, float]:
    found = sums.exponents
    total = sum(found.values())
    return {
        exponent: 100 * found[exponent] / total
        for exponent in range(min(found, default=0), max(found, default=-1) + 1)
    }


def _title(name: str) -> str:
    return name.replace("_percent", " %").replace("_", " ")
