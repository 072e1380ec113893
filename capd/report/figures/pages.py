"""All pages of figures, in the order in which they are drawn."""

from __future__ import annotations

from collections.abc import Iterator

from capd.analyze.groups import Groups
from capd.report.figures.channels import channel_pages
from capd.report.figures.comparison import comparison_pages
from capd.report.figures.error_maps import error_pages
from capd.report.figures.exponents import exponent_pages
from capd.report.figures.hif8 import hif8_pages
from capd.report.figures.maps import map_pages
from capd.report.figures.nonfinite import overflow_pages
from capd.report.figures.ranges import range_pages
from capd.report.figures.statistics import box_pages, iteration_pages, layer_pages
from capd.report.figures.style import Page

__all__ = ["all_pages"]


def all_pages(groups: Groups) -> Iterator[Page]:
    """Yield the pages of a report. docs/report.md lists them."""
    for pages in (
        comparison_pages, layer_pages, iteration_pages, box_pages, map_pages, exponent_pages, hif8_pages,
        overflow_pages, range_pages, error_pages, channel_pages,
    ):  # fmt: skip
        yield from pages(groups)
