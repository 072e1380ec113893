"""The HiFP8 page: how each quant type's values use the format's exponent regimes and codes, and its errors on them.

All numbers are from `capd.analyze.hif8_regimes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from capd.analyze.distribution import Distribution
from capd.analyze.groups import Groups
from capd.analyze.hif8_regimes import FINITE_CODES, REGIMES, Hif8Use, exponent_errors, hif8_use
from capd.report.figures.error_maps import METRICS
from capd.report.figures.layers import lines_by_layer
from capd.report.figures.style import (
    Page,
    bars,
    label,
    legend,
    log_shares,
    new_figure,
    numbers_on,
    say,
    style,
)
from capd.report.gather import by_layer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["hif8_pages"]

_SHORT = {"underflow": "under-\nflow", "overflow": "over-\nflow"}
_TICKS = (-(2.0**15), -16.0, -1.0, -(2.0**-8), 0.0, 2.0**-8, 1.0, 16.0, 2.0**15)
# A smaller value is 0 in every format except bf16.
_LEAST_EXPONENT = -28
_RELATIVE = "Σ|error| / Σ|x| (%)"


def hif8_pages(groups: Groups) -> Iterator[Page]:
    """Yield one page if elements were read."""
    if groups.whole().distribution is not None:
        yield Page("hifp8.png", partial(_page, groups))


def _page(groups: Groups) -> Figure:
    figure, [[regimes, codes, used], [errors, others, layers]] = new_figure(
        "HiFP8: exponent regimes, codes and errors", 2, 3, (4.6, 3.3)
    )
    uses = {
        label(one): hif8_use(tally.distribution or Distribution())
        for (one,), tally in groups.by("quant_type").items()
    }
    _regimes(regimes, uses)
    _codes(codes, uses)
    _used(used, uses)
    _by_regime(errors, uses)
    _by_magnitude(others, groups.whole().distribution or Distribution())
    _by_layer(layers, groups)
    legend(figure, [regimes, layers])
    return figure


def _regimes(panel: Axes, uses: Mapping[str, Hif8Use]) -> None:
    names = ["zero", "underflow", *REGIMES, "overflow"]
    shares = {text: [100 * one.share or None for one in use.regimes] for text, use in uses.items()}
    bars(panel, [_SHORT.get(name, name) for name in names], shares)
    log_shares(panel.yaxis, shares.values())
    panel.set(title="values by exponent regime (D)", xlabel="regime", ylabel="finite values (%)")


def _codes(panel: Axes, uses: Mapping[str, Hif8Use]) -> None:
    values = _code_values()
    order = np.argsort(values, kind="stable")[:FINITE_CODES]
    edges = np.arange(FINITE_CODES + 1) - 0.5
    shares = [100 * use.codes[order] / max(1, use.finite) for use in uses.values()]
    for number, share in enumerate(shares):
        drawn = np.where(share > 0, share, np.nan)
        panel.stairs(drawn, edges, edgecolor=style(number)["color"], linewidth=0.9)
    log_shares(panel.yaxis, [share.tolist() for share in shares])
    panel.set_xticks(np.searchsorted(values[order], _TICKS), map(_power, _TICKS))
    panel.set_xlim(edges[0], edges[-1])
    title = f"values on each of the {FINITE_CODES} finite codes"
    panel.set(title=title, xlabel="code, by its value", ylabel="finite values (%)")


def _code_values() -> Any:
    """Return the values of all codes, with NaN and Inf at the end."""
    import torch

    from capd.formats import Encoded, decode

    values = decode(Encoded(torch.arange(256, dtype=torch.uint8), None, None, "hifp8")).double().numpy()
    return np.where(np.isfinite(values), values, np.nan)


def _power(value: float) -> str:
    if value in (0.0, 1.0, -1.0, 16.0, -16.0):
        return f"{value:g}"
    return f"{'-' if value < 0 else ''}2^{int(np.log2(abs(value)))}"


def _used(panel: Axes, uses: Mapping[str, Hif8Use]) -> None:
    shares = {
        text: [
            *(100 * one.codes_used / one.codes for one in use.regimes if one.name in REGIMES),
            100 * use.codes_used / FINITE_CODES,
        ]
        for text, use in uses.items()
    }
    bars(panel, [*REGIMES, "all"], shares)
    bits = [use.entropy_bits or 0.0 for use in uses.values()]
    low, high = min(bits, default=0.0), max(bits, default=0.0)
    title = f"codes in use; entropy {low:.2f}{f' to {high:.2f}' if high > low else ''} of 7.98 bits"
    panel.set(title=title, ylim=(0, 100), xlabel="regime", ylabel="codes that occur (%)")


def _by_regime(panel: Axes, uses: Mapping[str, Hif8Use]) -> None:
    found = {
        text: [METRICS["relative"].of(one.errors) for one in use.regimes if one.name in REGIMES]
        for text, use in uses.items()
    }
    bars(panel, list(REGIMES), found)
    panel.set(title="relative error by exponent regime", xlabel="regime", ylabel=_RELATIVE)
    numbers_on(panel.yaxis)


def _by_magnitude(panel: Axes, distribution: Distribution) -> None:
    found = exponent_errors(distribution)
    if not found.exponents:
        say(panel, "no number but zero")
    drawn: list[list[float | None]] = []
    for number, (text, errors) in enumerate(found.errors.items()):
        shares = [100 * one.relative if one.relative else None for one in errors]
        drawn.append(shares)
        look = {**style(number), "markersize": 2.5, "linewidth": 1.1}
        points = [np.nan if share is None else share for share in shares]
        if any(share is not None for share in shares):
            panel.plot(found.exponents, points, label=text, **look)
    log_shares(panel.yaxis, drawn)
    if found.exponents and found.exponents[-1] > _LEAST_EXPONENT > found.exponents[0]:
        panel.set_xlim(left=_LEAST_EXPONENT - 0.5)
    if panel.lines:
        panel.legend(fontsize=7, title="format, scale 1", title_fontsize=7)
    title, exponent = "relative error by magnitude, all values", "exponent e: 2^e ≤ |x| < 2^(e+1)"
    panel.set(title=title, xlabel=exponent, ylabel=_RELATIVE)


def _by_layer(panel: Axes, groups: Groups) -> None:
    numbers = {
        place: hif8_use(tally.distribution or Distribution()).errors.sqnr_db
        for place, tally in by_layer(groups).items()
    }
    lines_by_layer(panel, groups, numbers)
    if not panel.lines:
        say(panel, "no error")
    panel.set(title="SQNR of HiFP8 by layer", ylabel="SQNR (dB)")
    numbers_on(panel.yaxis)
