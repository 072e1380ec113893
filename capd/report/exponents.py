"""The page of magnitudes: how the binary exponents lie, by tensor name and quant type, from the stored statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from capd.analyze.groups import Groups, Value
from capd.report.figures import Page, label, legend, new_figure, paged, say, style
from capd.report.gather import BY_TENSOR
from capd.store.statistics import Stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["exponent_pages"]

_COLUMNS, _ROWS = 3, 2
_BIAS = 127
_OF_NUMBERS = range(1, 255)  # 0 has zeros and what is subnormal as float32, 255 NaN and Inf


def exponent_pages(groups: Groups) -> Iterator[Page]:
    """Six panels to a page; the first one is of all tensors."""
    panels: list[tuple[str, dict[Value, Stats]]] = [
        ("all tensors", {one: tally.stats for (one,), tally in groups.by("quant_type").items()})
    ]
    found = groups.by(*BY_TENSOR)
    for name in groups.values(BY_TENSOR, "tensor_name"):
        of_name = {one: tally.stats for (one, tensor), tally in found.items() if tensor == name}
        panels.append((label(name), of_name))
    types = groups.values(BY_TENSOR, "quant_type")
    for file, some in paged(panels, _COLUMNS * _ROWS, "exponents"):
        yield Page(file, partial(_page, types, some))


def _page(types: Sequence[Value], wanted: Sequence[tuple[str, dict[Value, Stats]]]) -> Figure:
    columns = min(_COLUMNS, len(wanted))
    title = "Magnitudes: binary exponents of the values"
    figure, axes = new_figure(title, -(-len(wanted) // columns), columns, (4.4, 3.0))
    panels = [panel for row in axes for panel in row]
    for panel, (what, of_types) in zip(panels, wanted, strict=False):
        drawn = [_steps(panel, of_types[one], types.index(one), label(one)) for one in of_types]
        panel.set_title(what)
        panel.set_xlabel("exponent e: 2^e ≤ |x| < 2^(e+1)")
        panel.set_ylabel("elements (%)")
        if any(drawn):
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter(_plain())
            panel.minorticks_off()
        else:
            say(panel, "no number but zero")
    for panel in panels[len(wanted) :]:
        panel.remove()
    legend(figure, panels[: len(wanted)])
    return figure


def _plain() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:g}")


def _steps(panel: Axes, stats: Stats, number: int, text: str) -> bool:
    """Draw the share of each exponent; returns whether there was any."""
    bins = [bin_ for bin_ in _OF_NUMBERS if stats.exponent_histogram.get(bin_)]
    if not bins:
        return False
    every = range(bins[0], bins[-1] + 1)
    shares = [100 * stats.exponent_histogram.get(bin_, 0) / stats.count or np.nan for bin_ in every]
    look = style(number)
    places = [bin_ - _BIAS for bin_ in every]
    panel.plot(places, shares, label=text, markersize=3, linewidth=1.2, **look)
    return True
