"""All pages of figures, in the order in which they are drawn."""

from __future__ import annotations

from collections.abc import Iterator

from capd.analyze.groups import Groups
from capd.report.boxes import box_pages
from capd.report.channels import channel_pages
from capd.report.comparison import comparison_pages
from capd.report.error_maps import error_pages
from capd.report.exponents import exponent_pages
from capd.report.figures import Page
from capd.report.hif8 import hif8_pages
from capd.report.iterations import iteration_pages
from capd.report.layers import layer_pages
from capd.report.maps import map_pages
from capd.report.nonfinite import overflow_pages
from capd.report.ranges import range_pages

__all__ = ["all_pages"]


def all_pages(groups: Groups) -> Iterator[Page]:
    """The pages of a report; docs/report.md lists them."""
    for pages in (
        comparison_pages, layer_pages, iteration_pages, box_pages, map_pages, exponent_pages, hif8_pages,
        overflow_pages, range_pages, error_pages, channel_pages,
    ):  # fmt: skip
        yield from pages(groups)
