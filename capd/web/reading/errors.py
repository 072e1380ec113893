"""The errors of formats by iteration that the lab measured on a tensor while it was captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capd.analyze.error_sums import Errors
from capd.errors import CapdError
from capd.lab.stored_errors import unpack_row
from capd.store.disk.layout import node_directory
from capd.store.read.elements import ReadTools
from capd.store.read.node import NodeView
from capd.store.read.series import Series
from capd.strict_json import json_number
from capd.web.reading.lines import MAX_POINTS, without_attempt
from capd_client.protocol.key import Moment

__all__ = ["errors_by_iteration"]


def errors_by_iteration(run: Path, places: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the errors of one tensor by iteration, all records of an iteration added up.

    This reads the spool of a node, which may be large: the page asks a process of its own for it.

    Args:
        run: The run.
        places: Node and path of each series with errors of the tensor.

    Returns:
        `iteration`, and `formats`: by label the numbers beside it, null where the format did not take the tensor.
        `records`: the number of measured records. Every `step`-th one is read. `problem`: why one could not be.
    """
    rows = _newest(run, places)
    step = -(-len(rows) // MAX_POINTS) or 1
    found: dict[int, dict[str, Errors]] = {}
    problem = ""
    for moment, series, number in rows[::step]:
        try:
            row = unpack_row(series.read(number).tobytes())
        except CapdError as error:
            problem = str(error)
            continue
        at = found.setdefault(moment.iteration, {})
        for label, errors in row.errors.items():
            if label in at:
                at[label].add(errors)
            else:
                at[label] = errors
    found = dict(sorted(found.items()))
    labels = sorted({label for errors in found.values() for label in errors})
    return {
        "records": len(rows),
        "step": step,
        "problem": problem,
        "iteration": list(found),
        "formats": {label: _numbers([errors.get(label) for errors in found.values()]) for label in labels},
    }


def _newest(run: Path, places: Sequence[tuple[str, str]]) -> list[tuple[Moment, Series, int]]:
    """Return the rows in the order of their iterations; of each moment, that of the job's latest attempt."""
    found: dict[tuple[object, ...], tuple[Moment, Series, int]] = {}
    for node, path in places:
        view = NodeView(run, node_directory(run, node), only=path)
        if path not in view.series:
            continue
        series = Series(view, view.series[path], ReadTools())
        for number, moment in zip(series.numbers, series.moments, strict=True):
            when = without_attempt(moment)
            if when not in found or found[when][0].attempt <= moment.attempt:
                found[when] = (moment, series, number)
    return sorted(found.values(), key=lambda one: one[0].iteration)


def _numbers(errors: Sequence[Errors | None]) -> Mapping[str, list[float | str | None]]:
    return {
        name: [None if one is None else json_number(read(one)) for one in errors]
        for name, read in _READ.items()
    }


def _scale_std(errors: Errors) -> float | None:
    return None if errors.blocks is None else errors.blocks.scale_log2_std


def _relative_percent(errors: Errors) -> float | None:
    return None if errors.relative is None else 100 * errors.relative


_READ = {
    "sqnr": lambda errors: errors.sqnr_db,
    "relative": _relative_percent,
    "underflow": lambda errors: errors.underflow_percent,
    "saturation": lambda errors: errors.saturation_percent,
    "flushed": lambda errors: errors.flush_percent,
    "scale_std": _scale_std,
}
