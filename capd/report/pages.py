"""All pages of figures, in the order in which they are drawn."""

from __future__ import annotations

from collections.abc import Iterator

from capd.analyze.groups import Groups
from capd.report.comparison import comparison_pages
from capd.report.exponents import exponent_pages
from capd.report.figures import Page
from capd.report.layers import layer_pages
from capd.report.maps import map_pages
from capd.report.nonfinite import overflow_pages

__all__ = ["all_pages"]


def all_pages(groups: Groups) -> Iterator[Page]:
    """The pages of a report; docs/cli.md lists them."""
    for pages in (comparison_pages, layer_pages, map_pages, exponent_pages, overflow_pages):
        yield from pages(groups)
