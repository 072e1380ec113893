"""The differences of two runs' scalars: their last values, and where they part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from capd.io.items import Skipped
from capd.io.scalar_table import readable_scalars
from capd.store.read.scalars import Scalar
from capd.store.read.store import open_store

__all__ = ["scalar_differences"]

_Places = Mapping[tuple[int, int, int], float]


def scalar_differences(left: str, right: str) -> tuple[list[dict[str, Any]], list[Skipped]]:
    """Return a row for each scalar and rank that both runs have, and the damaged scalars.

    Values are compared at the same iteration, micro-batch and call. Two NaNs are equal.

    Args:
        left: A run.
        right: Another run.

    Returns:
        Rows with `name`, `rank`, `left_last` and `right_last`, `compared` (the number of places in both runs),
        `first_different` (the first iteration whose values differ, None if none does) and `max_abs` (the largest
        |left - right|, Inf or NaN if only one side is finite anywhere, None if nothing was compared).
    """
    reads = [readable_scalars(open_store(run)) for run in (left, right)]
    lefts, rights = ({(one.name, one.rank): one for one in read.found} for read in reads)
    rows = [
        {
            "name": name,
            "rank": rank,
            "left_last": float(one.values[-1]),
            "right_last": float(rights[name, rank].values[-1]),
            **_compared(_by_place(one), _by_place(rights[name, rank])),
        }
        for (name, rank), one in lefts.items()
        if (name, rank) in rights
    ]
    return rows, [one for read in reads for one in read.skipped]


def _by_place(one: Scalar) -> _Places:
    places = zip(one.iterations.tolist(), one.micro_batches.tolist(), one.calls.tolist(), strict=True)
    return dict(zip(places, one.values.tolist(), strict=True))


def _compared(lefts: _Places, rights: _Places) -> dict[str, Any]:
    places = sorted(lefts.keys() & rights.keys())
    a, b = (np.array([side[place] for place in places], "float64") for side in (lefts, rights))
    different = (a != b) & ~(np.isnan(a) & np.isnan(b))
    # Equal infinities and two NaNs differ by nothing.
    with np.errstate(invalid="ignore"):
        distance = np.where(different, np.abs(a - b), 0.0)
    return {
        "compared": len(places),
        "first_different": places[int(different.argmax())][0] if different.any() else None,
        "max_abs": float(distance.max()) if places else None,
    }
