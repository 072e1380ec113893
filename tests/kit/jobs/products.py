"""Checks that the captured products of a run hold: each against its own captured operands."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from capd.check.checking import Checked, check_calls
from capd.check.document import check_document
from capd.check.judging import ProductLimits
from capd.check.units import units_of
from capd.io.items import items_of_runs
from capd.products.captured.calls import ProductCalls
from capd.store.read.store import open_store

__all__ = ["assert_products_hold", "calls_of_run", "checked_run"]


def calls_of_run(run: Path, *, by_rank: bool = False) -> ProductCalls:
    """Return the captured calls of a run: of several ranks, what is put together, unless `by_rank`."""
    calls, store = ProductCalls(), open_store(run)
    if not by_rank and len({series.key.rank for series in store.series}) > 1:
        for whole in store.logical():
            calls.add_whole(whole)
    else:
        for item in items_of_runs([run], []).found:
            loaded = item.load()
            if loaded is not None:
                calls.add(item, loaded)
    return calls


def checked_run(run: Path, *, by_rank: bool = False) -> Checked:
    """Check a run as `capd check` does: of several ranks, what is put together, unless `by_rank`."""
    calls = calls_of_run(run, by_rank=by_rank)
    checked, threads = Checked(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for unit, outcome in check_calls(units_of(calls, 1.0), ProductLimits(), 2):
            checked.add(unit, outcome)
    finally:
        torch.set_num_threads(threads)
    return checked


def assert_products_hold(run: Path, *, none: str = "") -> Counter[str]:
    """Assert that products were checked and that none is beyond the limits. Returns how many, by name.

    The run is checked as a whole, and rank by rank: either finds what the other cannot compare.

    Args:
        run: The run.
        none: Why the job captures no product that can be checked. It is an error if one can.
    """
    found: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for by_rank in (False, True):
        checked = checked_run(run, by_rank=by_rank)
        document = check_document(str(run), checked, ProductLimits(), (), is_whole=not by_rank)
        assert not document["beyond"], document["first"][:3]
        assert not checked.skipped, checked.skipped[:3]
        found.update(one.product for one in checked.findings)
        reasons.update(checked.left_out)
    assert bool(found) is not bool(none), none or dict(reasons)
    return found
