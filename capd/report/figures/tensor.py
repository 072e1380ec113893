"""The page of one tensor: its values, magnitudes, channels and trend, and the errors of each format on it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from capd.analyze.groups import Groups, Value
from capd.analyze.verdict.roles import is_gradient
from capd.report.figures.channels import channels_of_tensor, draw_amax
from capd.report.figures.comparison import overlay
from capd.report.figures.error_maps import METRICS, labels_of
from capd.report.figures.exponents import GRIDS, exponent_shares, precision_steps
from capd.report.figures.statistics import draw_trend
from capd.report.figures.style import (
    Page,
    bars,
    label,
    legend,
    new_figure,
    numbers_on,
    say,
    share_exponents,
    value_axis,
)
from capd.report.gather import BY_TENSOR
from capd.store.documents.names import component
from capd_client.process.text import human_count, table_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["tensor_pages"]

_FIELDS = ("layer", "rank", "layer_type", "component", "operation", "phase")
_STATISTICS = ("min", "max", "mean", "std", "absmax")


def tensor_pages(groups: Groups, *, log: bool | None = None) -> Iterator[Page]:
    """Yield a page for each tensor name, with all of its records together and a line for each quant type.

    `log`: as of the pages of statistics, for absmax. Values and channels are logarithmic only if it is set.
    """
    for name in groups.values("tensor_name"):
        yield Page(f"tensor_{component(str(name))}.png", partial(_page, groups, name, log))


def _page(groups: Groups, name: Value, log: bool | None) -> Figure:
    found = groups.by(*BY_TENSOR, tensor_name=name)
    height = 0.15 + 0.07 * len(found)
    figure, [[values, exponents, trend], [errors, precision, channels], [numbers, *rest]] = new_figure(
        f"{label(name)}{_where(groups)}", 3, 3, (4.6, 2.9), height_ratios=(1.3, 1, height)
    )
    overlay(values, groups, name, log=bool(log))
    values.set_title("values")
    exponent_shares(exponents, groups, found)
    exponents.set_title("magnitudes")
    precision_steps(precision, GRIDS)
    precision.set_title("precision of the formats")
    precision.legend(fontsize=7, loc="upper left")
    share_exponents(exponents, precision)
    draw_trend(trend, groups, name, "absmax")
    value_axis(trend, log=is_gradient(name) if log is None else log)
    trend.set_title("absmax by iteration")
    _errors(errors, groups, name)
    _channels(channels, groups, name, bool(log))
    _numbers(numbers, groups, name)
    for panel in rest:
        panel.remove()
    legend(figure, [values, exponents, trend, errors, channels])
    return figure


def _where(groups: Groups) -> str:
    """Return the facts that all records share, as a text."""
    shared = []
    for field in _FIELDS:
        values = groups.values(field)
        if len(values) == 1 and values[0] not in (None, ""):
            word = f"{field} " if field in ("layer", "rank") else ""
            text = f"{word}{label(values[0])}"
            shared += [] if text in shared else [text]
        elif field in ("layer", "rank") and len(values) > 1:
            shared.append(f"{len(values):,} {field}s")
    return f": {', '.join(shared)}" if shared else ""


def _errors(panel: Axes, groups: Groups, name: Value) -> None:
    formats = labels_of(groups)
    found = {
        label(one): [METRICS["sqnr"].of(tally.errors.get(each)) for each in formats]
        for (one,), tally in groups.by(*BY_TENSOR, tensor_name=name).items()
        if tally.errors
    }
    if found:
        bars(panel, [label(each) for each in formats], found)
        panel.tick_params(axis="x", rotation=20 if len(formats) > 4 else 0)
    else:
        say(panel, "no format was measured")
    panel.set(title="SQNR by format", xlabel="format", ylabel="SQNR (dB)")
    numbers_on(panel.yaxis)


def _channels(panel: Axes, groups: Groups, name: Value, log: bool) -> None:
    found = channels_of_tensor(groups, name)
    panel.set_title("largest magnitude by channel")
    if not found:
        panel.set(xlabel="channel", ylabel="max |x|")
        say(panel, "no channel was looked at")
        return
    number, of_types = max(found.items(), key=lambda pair: sum(each.records for _, each in pair[1].values()))
    draw_amax(panel, of_types, log=log)
    if len(found) > 1:
        panel.set_title(f"largest magnitude by channel, of those with {number:,}")


def _numbers(panel: Axes, groups: Groups, name: Value) -> None:
    """Draw a table of statistics in the place of a panel."""
    rows = []
    for (one,), tally in groups.by(*BY_TENSOR, tensor_name=name).items():
        stats = tally.stats
        numbers = (getattr(stats, each) for each in _STATISTICS)
        cells = ("-" if value is None else f"{value:.4g}" for value in numbers)
        counts = (tally.records, stats.count, stats.nan, stats.inf, stats.zero)
        rows.append((label(one), *map(human_count, counts), *cells))
    header = ("quant type", "records", "elements", "NaN", "Inf", "zero", *_STATISTICS)
    panel.set_axis_off()
    text = "\n".join(table_lines(header, rows, header[1:]))
    written = panel.text(0, 1, text, va="top", family="monospace", fontsize=8, transform=panel.transAxes)
    # The text is as wide as the figure, so it must not widen its column.
    written.set_in_layout(False)
