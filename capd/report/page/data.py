"""The data of the report's page: what `capd/report/assets` shows, in one document. docs/report.md says what each is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import capd
from capd.analyze.format_choice import FormatChoice
from capd.analyze.groups import Groups, Value
from capd.report.gather import BY_ITERATION, BY_RANK, Gathered
from capd.report.page.format_data import grids_data, hif8_data, overflow_data
from capd.report.page.group_data import (
    boxes_data,
    cells_data,
    channels_data,
    distributions_data,
    hif8_groups,
    iterations_data,
    nonfinite_data,
)
from capd.report.page.ledger import ledger_data
from capd.report.page.plain import METRICS, quantiles_plain, tally_plain
from capd.report.page.series_data import series_data
from capd.report.quantiles import QUANTILES

__all__ = ["page_data"]

_MOST_SKIPPED = 200


def page_data(
    sources: Sequence[str],
    gathered: Gathered,
    *,
    files: bool,
    quick: bool,
    choices: Sequence[FormatChoice] = (),
) -> dict[str, Any]:
    """The whole document. files: the sources are directories of tensor files, which have no ledger."""
    groups = gathered.groups
    notes: list[str] = []
    whole = groups.whole()
    return {
        "format": 1,
        "title": ", ".join(Path(source).stem or source for source in sources),
        "capd": capd.__version__,
        "sources": list(sources),
        "quick": quick,
        "quantiles": list(QUANTILES),
        "metrics": list(METRICS),
        "metric_notes": METRICS,
        "formats": [] if quick else [choice.label for choice in choices],
        "all": {**tally_plain(whole), "quantiles": quantiles_plain(whole)},
        "ledger": [] if files else [ledger_data(source) for source in sources],
        "types": [_type(gathered, one) for one in groups.values(("quant_type",), "quant_type")],
        "counts": [
            {"quant_type": one, "layer": layer, "rank": rank, "records": tally.records}
            for (one, layer, rank), tally in groups.by(*BY_RANK).items()
        ],
        "skipped": [{"name": one.name, "reason": one.reason} for one in gathered.skipped[:_MOST_SKIPPED]],
        "skipped_total": len(gathered.skipped),
        "unmeasured": [
            {"name": name, "reason": reason, "records": records}
            for (name, reason), records in list(gathered.unmeasured.items())[:_MOST_SKIPPED]
        ],
        "without_statistics": gathered.without_statistics,
        "cells": cells_data(groups),
        "distributions": distributions_data(groups),
        "grids": grids_data(),
        "boxes": boxes_data(groups),
        "channels": channels_data(groups, notes),
        "iterations": iterations_data(groups, notes),
        "hifp8": hif8_data(groups),
        "hifp8_groups": hif8_groups(groups),
        "overflow": overflow_data(groups),
        "nonfinite": nonfinite_data(groups),
        **series_data(gathered.series, notes),
        "notes": notes,
    }


def _type(gathered: Gathered, one: Value) -> dict[str, Any]:
    groups = gathered.groups
    tally = groups.by("quant_type")[one,]
    said = sorted({emulation or "" for each, emulation in gathered.emulations if each == one})
    return {
        "quant_type": one,
        **tally_plain(tally),
        "quantiles": quantiles_plain(tally),
        "series": sum(1 for each in gathered.series or () if each.key.quant_type == one),
        "layers": _number(groups, BY_RANK, "layer", one),
        "ranks": _number(groups, BY_RANK, "rank", one),
        "iterations": _number(groups, BY_ITERATION, "iteration", one),
        "emulation": "; ".join(text or "not said" for text in said) if any(said) else None,
    }


def _number(groups: Groups, grouping: tuple[str, ...], name: str, one: Value) -> int:
    """How many values of a field a quant type has; what has no layer counts as none."""
    types, place = grouping.index("quant_type"), grouping.index(name)
    found = {values[place] for values in groups.by(*grouping) if values[types] == one}
    return len(found - {None})
