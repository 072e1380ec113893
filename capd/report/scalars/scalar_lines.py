"""The scalars of a report: one line per name and run, over the iterations, with its spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from capd.io.items import Skipped
from capd.io.scalar_table import readable_scalars
from capd.store.read.scalars import Scalar
from capd.store.read.store import open_store

__all__ = ["scalar_lines"]


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
    counts = np.diff(np.append(first, at.size))
    # A NaN makes the mean NaN, and so do infinities of both signs.
    with np.errstate(invalid="ignore", over="ignore"):
        mean = np.add.reduceat(values, first) / counts
    return {
        "ranks": len(ranks),
        "values": at.size,
        "iteration": iterations.tolist(),
        "mean": mean.tolist(),
        "min": np.fmin.reduceat(values, first).tolist(),
        "max": np.fmax.reduceat(values, first).tolist(),
    }
