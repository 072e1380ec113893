"""The page of magnitudes: shares of the binary exponents by tensor name and quant type, from the stored statistics.

Below the exponents it shows the range of each format and its precision at each exponent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from capd.analyze.grids import grids
from capd.analyze.groups import Groups, Tally, Value
from capd.report.figures.style import (
    Page,
    label,
    legend,
    log_shares,
    new_figure,
    numbers_on,
    paged,
    say,
    share_exponents,
    style,
)
from capd.report.gather import BY_TENSOR
from capd.store.format.statistics import Stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["GRIDS", "exponent_pages", "exponent_shares", "precision_steps"]

GRIDS = ("hifp8", "e4m3", "e5m2", "e2m1")
"""The labels of the grids (`capd.analyze.grids`) that are drawn below the exponents by default."""
_COLUMNS, _ROWS = 3, 2
_BIAS = 127
# Bin 0 has zeros and subnormals of float32, bin 255 NaN and Inf.
_OF_NUMBERS = range(1, 255)
# Records by their quant type.
OfTypes = Mapping[tuple[Value, ...], Tally]


def exponent_pages(groups: Groups, shown: Sequence[str] = GRIDS) -> Iterator[Page]:
    """Yield pages of six pairs of panels. If there are several names, the first pair is for all tensors together."""
    names = groups.values("tensor_name")
    panels = [("all tensors", groups.by("quant_type"))] if len(names) > 1 else []
    panels += [(label(name), groups.by(*BY_TENSOR, tensor_name=name)) for name in names]
    for file, some in paged(panels, _COLUMNS * _ROWS, "exponents"):
        yield Page(file, partial(_page, groups, some, shown))


def _page(groups: Groups, wanted: Sequence[tuple[str, OfTypes]], shown: Sequence[str]) -> Figure:
    columns = min(_COLUMNS, len(wanted))
    rows = -(-len(wanted) // columns)
    title = "Magnitudes: exponents of the values, precision of the formats"
    figure, axes = new_figure(title, 2 * rows, columns, (4.4, 2.3), height_ratios=(2.2, 1) * rows)
    pairs = [pair for two in zip(axes[::2], axes[1::2], strict=True) for pair in zip(*two, strict=True)]
    for (panel, strip), (what, of_types) in zip(pairs, wanted, strict=False):
        exponent_shares(panel, groups, of_types)
        panel.set_title(what)
        precision_steps(strip, shown)
        share_exponents(panel, strip)
    for panel in chain.from_iterable(pairs[len(wanted) :]):
        panel.remove()
    legend(figure, figure.axes, "quant type; steps of formats")
    return figure


def exponent_shares(panel: Axes, groups: Groups, of_types: OfTypes) -> None:
    """Draw a line of the share of each exponent for each quant type of some records."""
    types = groups.values("quant_type")
    drawn = [_line(panel, tally.stats, types.index(one), label(one)) for (one,), tally in of_types.items()]
    panel.set(xlabel="exponent e: 2^e ≤ |x| < 2^(e+1)", ylabel="elements (%)")
    log_shares(panel.yaxis, drawn)
    if not any(drawn):
        say(panel, "no number but zero")


def _line(panel: Axes, stats: Stats, number: int, text: str) -> list[float]:
    """Draw the share of each exponent. Return the shares above 0."""
    bins = [bin_ for bin_ in _OF_NUMBERS if stats.exponent_histogram.get(bin_)]
    if not bins:
        return []
    every = range(bins[0], bins[-1] + 1)
    shares = [100 * stats.exponent_histogram.get(bin_, 0) / stats.count or np.nan for bin_ in every]
    places = [bin_ - _BIAS for bin_ in every]
    panel.plot(places, shares, label=text, markersize=3, linewidth=1.2, **style(number))
    return [share for share in shares if share == share]


def precision_steps(panel: Axes, shown: Sequence[str]) -> None:
    """Draw the mantissa bits of each format at each exponent, as steps that end with the format's range."""
    for number, name in enumerate(shown):
        bits = grids()[name].mantissa_bits
        exponents = sorted(bits)
        panel.stairs(
            [bits[exponent] for exponent in exponents],
            [exponents[0] - 0.5, *(exponent + 0.5 for exponent in exponents)],
            baseline=-1, label=f"{name} steps", edgecolor=style(number)["color"],
            linestyle=("-", "--", ":", "-.")[number % 4], linewidth=1.3,
        )  # fmt: skip
    most = max((max(grids()[name].mantissa_bits.values()) for name in shown), default=3)
    panel.set(xlabel="exponent e", ylabel="mantissa bits", ylim=(-1, 1 + most))
    numbers_on(panel.yaxis, whole=True)
