"""The scalars of a report: one line per name and run, over the iterations, with its spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capd.io.items import Skipped
from capd.io.scalar_table import readable_scalars
from capd.store.read.scalars import Scalar
from capd.store.read.store import open_store

__all__ = ["reduced", "scalar_lines"]

Floats = NDArray[np.float64]


def scalar_lines(sources: Sequence[str]) -> tuple[list[dict[str, Any]], list[Skipped]]:
    """Return the line of each scalar of some runs, whatever else the report selects, and the damaged scalars.

    Each line has `source`, `name`, `ranks` (their number), `values` (their number), and lists with an entry for each
    iteration: `iteration`, and `mean`, `min` and `max` over all values of the iteration.
    """
    found: list[dict[str, Any]] = []
    damaged: list[Skipped] = []
    for source in sources:
        by_name: dict[str, list[Scalar]] = {}
        read = readable_scalars(open_store(source))
        for one in read.found:
            by_name.setdefault(one.name, []).append(one)
        found += [{"source": source, "name": name, **_line(ranks)} for name, ranks in by_name.items()]
        damaged += read.skipped
    return found, damaged


def _line(ranks: Sequence[Scalar]) -> dict[str, Any]:
    at = np.concatenate([one.iterations for one in ranks])
    values = np.concatenate([one.values for one in ranks])
    order = np.argsort(at, kind="stable")
    at, values = at[order], values[order]
    iterations, first = np.unique(at, return_index=True)
    return {
        "ranks": len(ranks),
        "values": at.size,
        "iteration": iterations.tolist(),
        **reduced({"mean": values, "min": values, "max": values}, first),
    }


def reduced(line: Mapping[str, Floats], first: NDArray[np.intp]) -> dict[str, list[float]]:
    """Return the mean, the minimum and the maximum of each part of a line, so that no spike and no NaN disappears.

    Args:
        line: `mean`, `min` and `max` of each entry.
        first: The first entry of each part.
    """
    counts = np.diff(np.append(first, line["mean"].size))
    # A NaN makes the mean NaN, and so do infinities of both signs.
    with np.errstate(invalid="ignore", over="ignore"):
        mean = np.add.reduceat(line["mean"], first) / counts
    return {
        "mean": mean.tolist(),
        "min": np.fmin.reduceat(line["min"], first).tolist(),
        "max": np.fmax.reduceat(line["max"], first).tolist(),
    }
