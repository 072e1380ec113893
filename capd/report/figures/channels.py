"""The page of outlier channels: the largest magnitude of each channel, and the largest compared to the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from capd.analyze.channels import Channels
from capd.analyze.groups import Groups, Value
from capd.report.figures.style import (
    MOST_DRAWN,
    Page,
    drawable,
    label,
    legend,
    log_ranks,
    log_values,
    new_figure,
    numbers_on,
    paged,
    say,
    style,
    value_axis,
)
from capd.report.gather import BY_TENSOR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["channel_pages", "channels_of_tensor", "draw_amax", "draw_ranks"]

_ROWS = 4
# The number of channels that are labelled with their index.
_NAMED = 3
OfTypes = Mapping[int, tuple[str, Channels]]


def channel_pages(groups: Groups, *, log: bool = False) -> Iterator[Page]:
    """Yield pages with four rows each, one for each tensor name and number of channels, if channels were gathered."""
    rows = [
        (name, number, of_types)
        for name in groups.values("tensor_name")
        for number, of_types in channels_of_tensor(groups, name).items()
    ]
    for file, some in paged(rows, _ROWS, "channels"):
        yield Page(file, partial(_page, some, log))


def channels_of_tensor(groups: Groups, name: Value) -> dict[int, OfTypes]:
    """Return for each number of channels the label and channels of each quant type, by the number of its line."""
    found: dict[int, dict[int, tuple[str, Channels]]] = {}
    types = groups.values("quant_type")
    for (one,), tally in groups.by(*BY_TENSOR, tensor_name=name).items():
        for number, channels in tally.channels.items():
            found.setdefault(number, {})[types.index(one)] = label(one), channels
    return dict(sorted(found.items()))


def _page(rows: Sequence[tuple[Value, int, OfTypes]], log: bool) -> Figure:
    figure, axes = new_figure("Channels: largest magnitudes and outliers", len(rows), 2, (6.4, 2.6))
    for (left, right), (name, number, of_types) in zip(axes, rows, strict=True):
        draw_amax(left, of_types, log=log)
        left.set_title(f"{label(name)}, {number:,} channels: {_outliers(of_types)}")
        draw_ranks(right, of_types)
        right.set_title(f"{label(name)}: channels by rank")
    legend(figure, figure.axes)
    return figure


def _outliers(of_types: OfTypes) -> str:
    shares = [channels.outlier_percent for _, channels in of_types.values()]
    ends = sorted({f"{share:.2g}" for share in (min(shares), max(shares))}, key=float)
    return f"{' to '.join(ends)} % of the values beyond 6 σ"


def draw_amax(panel: Axes, of_types: OfTypes, *, log: bool = False) -> None:
    """Draw max|x| of each channel, and label the largest channels with their index."""
    for number, (text, channels) in of_types.items():
        places = np.arange(channels.amax.size) * channels.width
        drawn = np.where(channels.amax <= MOST_DRAWN, channels.amax, np.nan)
        panel.plot(places, drawn, label=text, linewidth=0.8, color=style(number)["color"], alpha=0.8)
    for at, amax in _largest([channels for _, channels in of_types.values()]):
        if drawable(amax):
            panel.annotate(f"{at:,}", (at, amax), (2, 2), textcoords="offset points", fontsize=7)
    panel.margins(y=0.12)
    panel.set(xlabel="channel (index of the last axis)", ylabel="max |x|")
    numbers_on(panel.xaxis, whole=True)
    value_axis(panel, log=log)


def _largest(several: Sequence[Channels]) -> list[tuple[int, float]]:
    """Return index and max|x| of the largest channels. Only the largest of some neighbours is returned."""
    found: list[tuple[int, float]] = []
    ranked = sorted(
        (one for each in several for one in each.largest(_NAMED * len(several))), key=lambda one: -one[1]
    )
    for at, amax, _ in ranked:
        if len(found) < _NAMED and all(abs(at - other) > several[0].channels / 40 for other, _ in found):
            found.append((at, amax))
    return found


def draw_ranks(panel: Axes, of_types: OfTypes) -> None:
    """Draw max|x| of the channels over the median channel's, descending, on logarithmic axes."""
    for number, (text, channels) in of_types.items():
        middle = channels.median
        if middle:
            with np.errstate(over="ignore"):
                ranked = np.sort(channels.amax)[::-1] / middle
            ranked[ranked > MOST_DRAWN] = np.nan
            look = {**style(number), "marker": ""}
            panel.plot(np.arange(1, ranked.size + 1), ranked, label=text, linewidth=1.2, **look)
    panel.set(xlabel="rank of the channel", ylabel="max |x| / median")
    if panel.lines:
        log_ranks(panel)
        log_values(panel)
    else:
        say(panel, "the median channel is 0")
