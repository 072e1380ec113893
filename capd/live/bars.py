"""Text histograms: of exponents from stored statistics, and of any labelled counts. No numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["BAR_WIDTH", "bars", "exponent_bars"]

BAR_WIDTH = 40
MAX_EXPONENT_ROWS = 32
_BIAS = 127


def exponent_bars(
    histogram: Mapping[int, int], width: int = BAR_WIDTH, most_rows: int = MAX_EXPONENT_ROWS
) -> list[str]:
    """Return one bar for each power of two. Bin 0 holds zeros and subnormals, bin 255 NaN and infinities.

    If there are more than `most_rows` powers, they are joined in groups of equal width.
    """
    powers = sorted(bin_ for bin_, count in histogram.items() if count and 0 < bin_ < 255)
    rows: list[tuple[str, int]] = []
    if histogram.get(0):
        rows.append(("zero, tiny", histogram[0]))
    if powers:
        low, high = powers[0], powers[-1]
        step = -(-(high - low + 1) // max(1, most_rows))
        for start in range(low, high + 1, step):
            end = min(start + step - 1, high)
            label = f"2^{start - _BIAS}" if step == 1 else f"2^{start - _BIAS}…{end - _BIAS}"
            rows.append((label, sum(histogram.get(bin_, 0) for bin_ in range(start, end + 1))))
    if histogram.get(255):
        rows.append(("NaN, Inf", histogram[255]))
    return bars(rows, width)


def bars(rows: Sequence[tuple[str, int]], width: int = BAR_WIDTH) -> list[str]:
    """Return one line for each label and count, with a bar whose longest takes `width` characters."""
    if not rows:
        return ["  (no values)"]
    most = max(count for _, count in rows)
    labels = max(len(label) for label, _ in rows)
    return [
        f"  {label:>{labels}}  {'#' * max(1 if count else 0, round(count / most * width)):<{width}} {count:,}"
        for label, count in rows
    ]
