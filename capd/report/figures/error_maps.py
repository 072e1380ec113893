"""Pages of the formats' errors: maps of layer × tensor name, and boxes across the layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from capd.analyze.error_sums import Errors
from capd.analyze.groups import Groups, Value, in_order
from capd.report.figures.boxes import grouped_boxes
from capd.report.figures.maps import Cells, draw_map
from capd.report.figures.style import Page, label, legend, paged, panels_of, value_axis
from capd.report.gather import BY_LAYER
from capd.store.documents.names import component

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["METRICS", "Metric", "error_box_pages", "error_map_pages", "error_pages", "labels_of"]

_COLUMNS, _BOX_COLUMNS, _BOX_ROWS = 3, 2, 3


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of an error. `property` is a property of `Errors`, and `factor` multiplies it. `title` is for people."""

    title: str
    property: str
    factor: float = 1.0

    def of(self, errors: Errors | None) -> float | None:
        """Return the number, None if there is none or it is not finite (the SQNR without an error)."""
        value = None if errors is None else getattr(errors, self.property)
        return self.factor * value if value is not None and np.isfinite(value) else None


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "sqnr": Metric("SQNR (dB)", "sqnr_db"),
        "underflow": Metric("underflow (% of the elements)", "underflow_percent"),
        "saturation": Metric("saturation (% of the elements)", "saturation_percent"),
        "flush": Metric("flush (% of the elements)", "flush_percent"),
        "relative": Metric("relative error (%)", "relative", 100),
        "l2": Metric("normalised L2 error (%)", "normalised_l2", 100),
        "cosine": Metric("cosine", "cosine"),
        "mse": Metric("MSE", "mse"),
        "mae": Metric("MAE", "mae"),
    }
)
"""The metrics by their words on the command line."""


def error_pages(groups: Groups) -> Iterator[Page]:
    """Yield the maps and boxes of a report if formats were measured: SQNR and underflow."""
    for name in ("sqnr", "underflow"):
        yield from error_map_pages(groups, name)
    yield from error_box_pages(groups, "sqnr")


def labels_of(groups: Groups) -> list[str]:
    """Return the formats that were measured on any record, in the order of the request."""
    return list(groups.whole().errors)


def error_map_pages(groups: Groups, name: str, *, log: bool = False) -> Iterator[Page]:
    """Yield a page for each quant type with any error: a map for each format, all on one scale of colours."""
    for one in groups.values("quant_type"):
        if any(tally.errors for tally in groups.by(*BY_LAYER, quant_type=one).values()):
            yield Page(f"{name}_{component(str(one))}.png", partial(_maps, groups, one, METRICS[name], log))


def _maps(groups: Groups, one: Value, metric: Metric, log: bool) -> Figure:
    measured = {
        (layer, tensor): tally.errors
        for (tensor, layer), tally in groups.by(*BY_LAYER, quant_type=one).items()
        if tally.errors
    }
    layers, tensors = ({place[at] for place in measured} for at in (0, 1))
    formats: dict[str, Cells] = {
        name: {place: metric.of(errors.get(name)) for place, errors in measured.items()}
        for name in labels_of(groups)
    }
    # The height of the turned tick labels, in inches.
    turned = 0.075 * max(len(label(one)) for one in tensors) if len(tensors) > 2 else 0.1
    cell = (
        max(3.6, 1.2 + 0.55 * min(len(tensors), 12)),
        turned + min(5.0, max(1.8, 1.0 + 0.22 * len(layers))),
    )
    title = f"{label(one)}: {metric.title} by layer and tensor"
    figure, panels = panels_of(title, len(formats), _COLUMNS, cell)
    every = [number for cells in formats.values() for number in cells.values()]
    for panel, (name, cells) in zip(panels, formats.items(), strict=True):
        draw_map(
            figure, panel, cells, label(name), metric.title, "tensor", most_level=2, scale=every, log=log
        )
    return figure


def error_box_pages(groups: Groups, name: str, *, log: bool = False) -> Iterator[Page]:
    """Yield boxes of the layers' errors: a panel for each tensor name, a box for each format and quant type."""
    if not labels_of(groups) or len(groups.values("layer")) < 2:
        return
    measured = {tensor for (_, tensor, _), tally in groups.by(*BY_LAYER).items() if tally.errors}
    for file, some in paged(in_order(measured), _BOX_COLUMNS * _BOX_ROWS, f"{name}_boxes"):
        yield Page(file, partial(_boxes, groups, some, METRICS[name], log))


def _boxes(groups: Groups, tensors: Sequence[Value], metric: Metric, log: bool) -> Figure:
    formats, types = labels_of(groups), groups.values("quant_type")
    cell = (max(4.4, 1.0 + 0.28 * len(formats) * len(types)), 3.0)
    figure, panels = panels_of(f"{metric.title} across layers", len(tensors), _BOX_COLUMNS, cell)
    for panel, tensor in zip(panels, tensors, strict=True):
        of_types = {one: groups.by(*BY_LAYER, quant_type=one, tensor_name=tensor).values() for one in types}
        numbers = {
            one: {name: [metric.of(tally.errors.get(name)) for tally in tallies] for name in formats}
            for one, tallies in of_types.items()
        }
        grouped_boxes(panel, formats, numbers)
        panel.set(title=label(tensor), ylabel=metric.title)
        value_axis(panel, log=log)
    legend(figure, panels)
    return figure
