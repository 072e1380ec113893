"""The formats in the page's data: their grids, and the use of HiFloat8's regimes and codes."""

from __future__ import annotations

from typing import Any

from capd.analyze.distribution import Distribution
from capd.analyze.grids import grids
from capd.analyze.groups import Groups, Value
from capd.analyze.hif8_regimes import FINITE_CODES, hif8_use
from capd.report.format_use import exponent_numbers, hif8_numbers, of_types
from capd.report.page.plain import rounded

__all__ = ["grids_data", "hif8_data"]


def grids_data() -> list[dict[str, Any]]:
    """Return the range of each format, and its mantissa bits at each exponent."""
    return [
        {
            **{name: getattr(grid, name) for name in ("label", "largest", "normal", "smallest")},
            "steps": [[exponent, bits] for exponent, bits in sorted(grid.mantissa_bits.items())],
        }
        for grid in grids().values()
    ]


def hif8_data(groups: Groups) -> list[dict[str, Any]]:
    """Return the use of HiFloat8 by all values (quant_type None) and by each quant type, empty without elements."""
    whole = groups.whole().distribution
    found: dict[Value, Distribution] = {} if whole is None else {None: whole, **of_types(groups)}
    return [{"quant_type": one, **_use(each)} for one, each in found.items()]


def _use(distribution: Distribution) -> dict[str, Any]:
    """Return the document's numbers, the count of each code, and the errors by exponent."""
    use = hif8_use(distribution)
    by_exponent = exponent_numbers(distribution, relative_error="relative", sqnr_db="sqnr_db")
    found = {**hif8_numbers(use), "finite_codes": FINITE_CODES, "by_exponent": by_exponent}
    return {**rounded(found), "codes": use.codes.tolist()}
