"""The quantiles of each group in reports."""

from __future__ import annotations

from capd.analyze.groups import Tally

__all__ = ["QUANTILES", "quantiles_of"]

QUANTILES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)


def quantiles_of(tally: Tally) -> list[float] | None:
    """Return the values at QUANTILES of the finite elements that were read, None if none was read."""
    return None if tally.distribution is None else tally.distribution.quantiles(QUANTILES)
