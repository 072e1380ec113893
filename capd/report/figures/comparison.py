"""Pages that compare the quant types: the number of records, and the values of each tensor name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from capd.analyze.distribution import Distribution
from capd.analyze.groups import Groups, Value
from capd.report.figures.style import (
    Page,
    label,
    legend,
    log_shares,
    new_figure,
    numbers_on,
    paged,
    say,
    style,
)
from capd.report.gather import BY_RANK, BY_TENSOR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["comparison_pages", "distribution_pages", "overlay"]

_COLUMNS, _ROWS = 3, 2
_BINS = 80
_ENDS = (0.001, 0.999)


def comparison_pages(groups: Groups) -> Iterator[Page]:
    """Yield the page of counts and, if elements were read, pages of value distributions."""
    yield Page("quant_types.png", partial(_counts, groups))
    yield from distribution_pages(groups)


def distribution_pages(groups: Groups, *, log: bool = False) -> Iterator[Page]:
    """Yield pages of values with six tensor names each, if elements were read."""
    found = groups.by(*BY_TENSOR)
    read = {name for (_, name), tally in found.items() if tally.distribution is not None}
    names = [name for name in groups.values(BY_TENSOR, "tensor_name") if name in read]
    for file, some in paged(names, _COLUMNS * _ROWS, "value_distribution"):
        yield Page(file, partial(_distributions, groups, some, log))


def _counts(groups: Groups) -> Figure:
    types = groups.values(BY_RANK, "quant_type")
    tallies = groups.by("quant_type")
    places = list(groups.by(*BY_RANK))
    panels: dict[str, list[float]] = {
        "records": [tallies[one,].records for one in types],
        "layers": [
            len({layer for name, layer, _ in places if name == one and layer is not None}) for one in types
        ],
        "ranks": [len({rank for name, _, rank in places if name == one}) for one in types],
        "raw size (MiB)": [tallies[one,].raw_bytes / 2**20 for one in types],
    }
    figure, [axes] = new_figure("Records by quant type", 1, len(panels), (3.0, max(2.0, 0.4 * len(types))))
    for panel, (what, numbers) in zip(axes, panels.items(), strict=True):
        colours = [style(number)["color"] for number in range(len(types))]
        bars = panel.barh(range(len(types)), numbers, color=colours)
        texts = [f"{number:,.0f}" if number == round(number) else f"{number:,.3g}" for number in numbers]
        panel.bar_label(bars, texts, padding=3)
        # The numbers at the bars need space.
        panel.set_xlim(0, 1.6 * max(numbers) or 1)
        panel.set_xlabel(what)
        numbers_on(panel.xaxis, whole="(" not in what)
        panel.set_yticks(range(len(types)), [label(one) for one in types] if panel is axes[0] else [])
        panel.invert_yaxis()
    axes[0].set_ylabel("quant type")
    return figure


def _distributions(groups: Groups, names: Sequence[Value], log: bool) -> Figure:
    columns = min(_COLUMNS, len(names))
    rows = -(-len(names) // columns)
    title = "Values by tensor, from the 0.1 % to the 99.9 % quantile"
    figure, axes = new_figure(title, rows, columns, (4.4, 3.0))
    panels = [panel for row in axes for panel in row]
    types = groups.values(BY_TENSOR, "quant_type")
    found = groups.by(*BY_TENSOR)
    for panel, name in zip(panels, names, strict=False):
        seen = {
            number: found[one, name].distribution for number, one in enumerate(types) if (one, name) in found
        }
        overlay(panel, {number: one for number, one in seen.items() if one is not None}, types, log=log)
        panel.set_title(label(name))
    for panel in panels[len(names) :]:
        panel.remove()
    legend(figure, panels[: len(names)])
    return figure


def overlay(panel: Axes, seen: dict[int, Distribution], types: Sequence[Value], *, log: bool) -> None:
    """Draw histograms of values over each other, on common bins. `seen` maps a line's number to its values."""
    panel.set_xlabel("value")
    panel.set_ylabel("elements per bin (%)")
    both = Distribution()
    seen = {number: one for number, one in seen.items() if one.finite()[1].size}
    for one in seen.values():
        both.add(one)
    ends = both.quantiles(_ENDS)
    if ends is None:
        say(panel, "no finite value")
        return
    low, high = ends if ends[0] < ends[1] else (ends[0] - 0.5, ends[1] + 0.5)
    drawn: list[list[float]] = []
    edges = np.linspace(low, high, _BINS + 1)
    for number, one in seen.items():
        values, counts = one.finite()
        within = np.histogram(values, edges, weights=counts.astype(np.float64))[0]
        shares = 100 * within / counts.sum()
        drawn.append(shares.tolist())
        panel.stairs(
            np.where(shares > 0, shares, np.nan) if log else shares,
            edges, label=label(types[number]), **_outline(number),
        )  # fmt: skip
    numbers_on(panel.xaxis)
    if log:
        log_shares(panel.yaxis, drawn)
    else:
        numbers_on(panel.yaxis)


def _outline(number: int) -> dict[str, Any]:
    look = style(number)
    return {"edgecolor": look["color"], "linestyle": look["linestyle"], "linewidth": 1.3}
