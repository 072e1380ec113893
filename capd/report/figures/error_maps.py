"""Pages of the formats' errors: maps of layer × tensor name, and boxes across the layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from capd.analyze.error_sums import Errors
from capd.analyze.groups import Groups, Value
from capd.report.figures.boxes import grouped_boxes
from capd.report.figures.maps import draw_map
from capd.report.figures.style import Page, label, legend, log_values, new_figure, numbers_on, paged, ticks_at
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
    found = groups.by(*BY_LAYER)
    for one in groups.values(BY_LAYER, "quant_type"):
        if any(tally.errors for (each, _, _), tally in found.items() if each == one):
            yield Page(f"{name}_{component(str(one))}.png", partial(_maps, groups, one, METRICS[name], log))


def _maps(groups: Groups, one: Value, metric: Metric, log: bool) -> Figure:
    cells = {
        (layer, tensor): tally.errors
        for (each, tensor, layer), tally in groups.by(*BY_LAYER).items()
        if each == one and tally.errors
    }
    layers = [value for value in groups.values(BY_LAYER, "layer") if any(cell[0] == value for cell in cells)]
    tensors = [
        value for value in groups.values(BY_LAYER, "tensor_name") if any(cell[1] == value for cell in cells)
    ]
    formats = labels_of(groups)
    grids = {name: np.full((len(layers), len(tensors)), np.nan) for name in formats}
    for (layer, tensor), errors in cells.items():
        for name in formats:
            value = metric.of(errors.get(name))
            grids[name][layers.index(layer), tensors.index(tensor)] = np.nan if value is None else value
    columns = min(_COLUMNS, len(formats))
    # The height of the turned tick labels, in inches.
    turned = 0.075 * max(len(label(one)) for one in tensors) if len(tensors) > 2 else 0.1
    cell = (
        max(3.6, 1.2 + 0.55 * min(len(tensors), 12)),
        turned + min(5.0, max(1.8, 1.0 + 0.22 * len(layers))),
    )
    title = f"{label(one)}: {metric.title} by layer and tensor"
    figure, axes = new_figure(title, -(-len(formats) // columns), columns, cell)
    flat = [panel for row in axes for panel in row]
    every = np.concatenate([grid.ravel() for grid in grids.values()])
    for panel, (name, grid) in zip(flat, grids.items(), strict=False):
        draw_map(figure, panel, grid, label(name), metric.title, scale=every, log=log)
        panel.set_xticks(*ticks_at(tensors), rotation=90 if len(tensors) > 2 else 0)
        panel.set_yticks(*ticks_at(layers))
        panel.set_xlabel("tensor")
        panel.set_ylabel("layer")
    for panel in flat[len(formats) :]:
        panel.remove()
    return figure


def error_box_pages(groups: Groups, name: str, *, log: bool = False) -> Iterator[Page]:
    """Yield boxes of the layers' errors: a panel for each tensor name, a box for each format and quant type."""
    if not labels_of(groups) or len(groups.values(BY_LAYER, "layer")) < 2:
        return
    measured = {tensor for (_, tensor, _), tally in groups.by(*BY_LAYER).items() if tally.errors}
    tensors = [value for value in groups.values(BY_LAYER, "tensor_name") if value in measured]
    for file, some in paged(tensors, _BOX_COLUMNS * _BOX_ROWS, f"{name}_boxes"):
        yield Page(file, partial(_boxes, groups, some, METRICS[name], log))


def _boxes(groups: Groups, tensors: Sequence[Value], metric: Metric, log: bool) -> Figure:
    columns, formats = min(_BOX_COLUMNS, len(tensors)), labels_of(groups)
    types, found = groups.values(BY_LAYER, "quant_type"), groups.by(*BY_LAYER)
    cell = (max(4.4, 1.0 + 0.28 * len(formats) * len(types)), 3.0)
    title = f"{metric.title} across layers"
    figure, axes = new_figure(title, -(-len(tensors) // columns), columns, cell)
    flat = [panel for row in axes for panel in row]
    for panel, tensor in zip(flat, tensors, strict=False):
        of_types = {
            one: {
                name: [
                    metric.of(tally.errors.get(name))
                    for (each, other, _), tally in found.items()
                    if (each, other) == (one, tensor)
                ]
                for name in formats
            }
            for one in types
        }
        grouped_boxes(panel, formats, of_types)
        panel.set_title(label(tensor))
        panel.set_ylabel(metric.title)
        if log:
            log_values(panel)
        else:
            numbers_on(panel.yaxis)
    for panel in flat[len(tensors) :]:
        panel.remove()
    legend(figure, flat[: len(tensors)])
    return figure
