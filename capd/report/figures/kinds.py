"""The kinds of figures that can be drawn one at a time: the data that each needs, and its pages of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from capd.analyze.format_choice import FormatChoice
from capd.analyze.groups import Groups
from capd.report.figures.channels import channel_pages
from capd.report.figures.comparison import distribution_pages
from capd.report.figures.error_maps import error_box_pages, error_map_pages
from capd.report.figures.exponents import GRIDS, exponent_pages
from capd.report.figures.hif8 import hif8_pages
from capd.report.figures.ranges import range_pages
from capd.report.figures.statistics import box_pages, iteration_pages, layer_pages
from capd.report.figures.style import Page
from capd.report.figures.tensor import tensor_pages

__all__ = ["KINDS", "FigureKind", "Wanted", "grids_of"]

Reads = Literal["statistics", "elements", "errors"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of a kind of figure.

    Attributes:
        choices: The formats that were named.
        metric: One of `error_maps.METRICS`.
        log: Whether values are on a logarithmic axis, or in logarithmic colours. None: only statistics of gradients.
    """

    choices: Sequence[FormatChoice] = ()
    metric: str = "sqnr"
    log: bool | None = None


@dataclass(frozen=True, slots=True)
class FigureKind:
    """A kind of figure.

    Attributes:
        reads: The needed data: stored statistics, elements, or elements whose errors in formats are measured.
        without: The reason why there may be nothing to draw.
        formats: Whether it takes formats.
        metric: Whether it takes a metric.
        log: Whether it takes the option for logarithmic axes.
        channels: Whether it needs channels.
    """

    pages: Callable[[Groups, Wanted], Iterator[Page]]
    reads: Reads
    without: str
    formats: bool = False
    metric: bool = False
    log: bool = True
    channels: bool = False


def grids_of(choices: Sequence[FormatChoice]) -> tuple[str, ...]:
    """Return the grids of formats, or of their elements, each once. Without formats, return the grids of the report."""
    from capd.analyze.grids import grid_of

    return tuple(dict.fromkeys(grid_of(one.fmt, one.spec.elem).label for one in choices)) or GRIDS


def _boxes(groups: Groups, wanted: Wanted) -> Iterator[Page]:
    if wanted.choices:
        return error_box_pages(groups, wanted.metric, log=bool(wanted.log))
    return box_pages(groups, log=wanted.log)


_NO_ELEMENT = "only statistics were kept of the selection"
_ONE_LAYER = "the selection has a single layer, or only its statistics were kept"
_NO_FORMAT = "no selected record has high-precision values that a format can be measured on"

KINDS: Mapping[str, FigureKind] = MappingProxyType(
    {
        "distribution": FigureKind(
            lambda groups, wanted: distribution_pages(groups, log=bool(wanted.log)), "elements", _NO_ELEMENT
        ),
        "exponents": FigureKind(
            lambda groups, wanted: exponent_pages(groups, grids_of(wanted.choices)),
            "statistics", "there is no statistic", formats=True, log=False,
        ),
        "layers": FigureKind(
            lambda groups, wanted: layer_pages(groups, log=wanted.log), "statistics", "there is no statistic"
        ),
        "heatmap": FigureKind(
            lambda groups, wanted: error_map_pages(groups, wanted.metric, log=bool(wanted.log)),
            "errors", _NO_FORMAT, formats=True, metric=True,
        ),
        "boxes": FigureKind(_boxes, "statistics", _ONE_LAYER, formats=True, metric=True),
        "channels": FigureKind(
            lambda groups, wanted: channel_pages(groups, log=bool(wanted.log)), "elements",
            "no selected record has elements along a last axis", channels=True,
        ),
        "iterations": FigureKind(
            lambda groups, wanted: iteration_pages(groups, log=wanted.log), "statistics",
            "no record says its iteration",
        ),
        "hifp8": FigureKind(lambda groups, _: hif8_pages(groups), "elements", _NO_ELEMENT, log=False),
        "overflow": FigureKind(lambda groups, _: range_pages(groups), "elements", _NO_ELEMENT, log=False),
        "tensor": FigureKind(
            lambda groups, wanted: tensor_pages(groups, log=wanted.log), "errors", "there is no tensor",
            formats=True, channels=True,
        ),
    }
)  # fmt: skip
"""The kinds by their words on the command line. docs/plots.md shows each."""
