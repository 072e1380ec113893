"""Pages that compare the quant types: the number of records, and the values of each tensor name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from capd.analyze.distribution import Distribution
from capd.analyze.groups import Groups, Value
from capd.report.figures.style import (
    Page,
    bars_by_type,
    label,
    legend,
    log_shares,
    new_figure,
    numbers_on,
    paged,
    panels_of,
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
    found = groups.by("tensor_name")
    names = [name for (name,), tally in found.items() if tally.distribution is not None]
    for file, some in paged(names, _COLUMNS * _ROWS, "value_distribution"):
        yield Page(file, partial(_distributions, groups, some, log))


def _counts(groups: Groups) -> Figure:
    types, tallies = groups.values("quant_type"), groups.by("quant_type")
    places = {one: groups.by(*BY_RANK, quant_type=one) for one in types}
    panels: dict[str, list[float]] = {
        "records": [tallies[one,].records for one in types],
        "layers": [len({layer for layer, _ in places[one]} - {None}) for one in types],
        "ranks": [len({rank for _, rank in places[one]}) for one in types],
        "raw size (MiB)": [tallies[one,].raw_bytes / 2**20 for one in types],
    }
    figure, [axes] = new_figure("Records by quant type", 1, len(panels), (3.0, max(2.0, 0.4 * len(types))))
    for panel, (what, numbers) in zip(axes, panels.items(), strict=True):
        texts = [f"{number:,.0f}" if number == round(number) else f"{number:,.3g}" for number in numbers]
        bars_by_type(panel, types, numbers, texts, 1.6)
        panel.set_xlabel(what)
        numbers_on(panel.xaxis, whole="(" not in what)
        panel.tick_params(labelleft=panel is axes[0])
    axes[0].set_ylabel("quant type")
    return figure


def _distributions(groups: Groups, names: Sequence[Value], log: bool) -> Figure:
    title = "Values by tensor, from the 0.1 % to the 99.9 % quantile"
    figure, panels = panels_of(title, len(names), _COLUMNS, (4.4, 3.0))
    for panel, name in zip(panels, names, strict=True):
        overlay(panel, groups, name, log=log)
        panel.set_title(label(name))
    legend(figure, panels)
    return figure


def overlay(panel: Axes, groups: Groups, name: Value, *, log: bool) -> None:
    """Draw histograms of the values of each quant type of a tensor name over each other, on common bins."""
    panel.set(xlabel="value", ylabel="elements per bin (%)")
    found = groups.by(*BY_TENSOR, tensor_name=name)
    both = Distribution()
    for tally in found.values():
        both.add(tally.distribution or Distribution())
    ends = both.quantiles(_ENDS)
    if ends is None:
        say(panel, "no finite value")
        return
    low, high = ends if ends[0] < ends[1] else (ends[0] - 0.5, ends[1] + 0.5)
    drawn: list[list[float]] = []
    edges = np.linspace(low, high, _BINS + 1)
    for number, one in enumerate(groups.values("quant_type")):
        distribution = found[one,].distribution if (one,) in found else None
        values, counts = (distribution or Distribution()).finite()
        if values.size:
            within = np.histogram(values, edges, weights=counts.astype(np.float64))[0]
            shares = 100 * within / counts.sum()
            drawn.append(shares.tolist())
            panel.stairs(
                np.where(shares > 0, shares, np.nan) if log else shares,
                edges, label=label(one), linewidth=1.3, linestyle=style(number)["linestyle"],
                edgecolor=style(number)["color"],
            )  # fmt: skip
    numbers_on(panel.xaxis)
    if log:
        log_shares(panel.yaxis, drawn)
    else:
        numbers_on(panel.yaxis)
