"""The data of the report's page: one document, which `capd/report/assets` shows (see docs/report.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capd._version import __version__
from capd.analyze.format_choice import FormatChoice
from capd.analyze.verdict.roles import is_gradient
from capd.phrase import plain_phrase
from capd.report.document import grouped
from capd.report.gather import BY_ITERATION, BY_RANK, GatheredRecords
from capd.report.names import sample_phrase
from capd.report.page.alerts_data import alerts_data
from capd.report.page.format_data import grids_data, hif8_data
from capd.report.page.group_data import (
    Notes,
    boxes_data,
    cells_data,
    channels_data,
    distributions_data,
    hif8_groups,
    iterations_data,
    nonfinite_data,
    overflow_data,
    tensor_boxes_data,
)
from capd.report.page.ledger import ledger_data
from capd.report.page.plain import METRICS, NUMBERS, picked, quantiles_of, rounded
from capd.report.page.replay_data import replay_data
from capd.report.page.scalars_data import scalars_data
from capd.report.page.series_data import series_data
from capd.report.page.verdict_data import verdict_data
from capd.report.quantiles import QUANTILES

__all__ = ["page_data"]

_MOST_SKIPPED = 200


def page_data(
    plain: dict[str, Any], gathered: GatheredRecords, *, files: bool, choices: Sequence[FormatChoice] = ()
) -> dict[str, Any]:
    """Make the whole document of the page.

    Args:
        plain: The report's document (`capd.report.document`) of the gathered records.
        gathered: The same records, with their series.
        files: Whether the sources are directories of tensor files, which have no ledger.
        choices: The formats whose errors were measured.
    """
    groups, sources = gathered.groups, plain["sources"]
    notes: Notes = []
    series = series_data(gathered.series, notes)
    return {
        "format": 1,
        "title": ", ".join(Path(source).stem or source for source in sources),
        "capd": __version__,
        "sources": sources,
        "quick": plain["quick"],
        "sample": None if plain["sample"] is None else plain_phrase(sample_phrase(plain["sample"])),
        "quantiles": list(QUANTILES),
        "metrics": list(METRICS),
        "metric_notes": METRICS,
        "gradients": [name for name in groups.values("tensor_name") if is_gradient(name)],
        "formats": [] if plain["quick"] else [choice.label for choice in choices],
        "verdict": verdict_data(plain["verdict"], series["series"]),
        "all": {**picked(plain["all"], *NUMBERS), "quantiles": quantiles_of(plain["all"])},
        "ledger": [] if files else [ledger_data(source) for source in sources],
        "types": [_type(plain, gathered, row) for row in grouped(plain, ("quant_type",))],
        "counts": [picked(row, *BY_RANK, "records") for row in grouped(plain, BY_RANK)],
        "skipped": plain["skipped"][:_MOST_SKIPPED],
        "skipped_total": len(plain["skipped"]),
        "unmeasured": plain["unmeasured"][:_MOST_SKIPPED],
        "without_statistics": plain["without_statistics"],
        "cells": cells_data(plain),
        "distributions": distributions_data(plain),
        "grids": grids_data(),
        "boxes": boxes_data(groups),
        "tensor_boxes": tensor_boxes_data(plain, notes),
        "channels": channels_data(groups, notes),
        "iterations": iterations_data(groups, notes),
        "scalars": scalars_data(plain, notes),
        "alerts": alerts_data(plain, notes),
        "replay": replay_data(plain, notes),
        "hifp8": hif8_data(groups),
        "hifp8_groups": hif8_groups(plain),
        "overflow": rounded(plain["overflow"]),
        "tensor_overflow": overflow_data(groups),
        "nonfinite": nonfinite_data(plain),
        **series,
        "notes": notes,
    }


def _type(plain: dict[str, Any], gathered: GatheredRecords, row: dict[str, Any]) -> dict[str, Any]:
    one = row["quant_type"]
    emulations = sorted({emulation or "" for each, emulation in gathered.emulations if each == one})

    def number(grouping: tuple[str, ...], name: str) -> int:
        """Return the number of values that a field of the quant type has. A missing layer is not counted."""
        found = {other[name] for other in grouped(plain, grouping) if other["quant_type"] == one}
        return len(found - {None})

    return {
        **picked(row, "quant_type", *NUMBERS),
        "quantiles": quantiles_of(row),
        "series": sum(1 for each in gathered.series or () if each.key.quant_type == one),
        "layers": number(BY_RANK, "layer"),
        "ranks": number(BY_RANK, "rank"),
        "iterations": number(BY_ITERATION, "iteration"),
        "emulations": emulations,
    }
