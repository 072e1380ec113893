"""Errors that the store does not take are counted, and the next ones are stored."""

from __future__ import annotations

from pathlib import Path

import capd
from tests.kit.store.cli import linear_key
from tests.kit.store.measuring import MeasuredWriter, errors_in, values_of
from tests.kit.store.writing import NoLimit


class Full(NoLimit):
    """A budget that may be full."""

    is_full = False

    def refusal(self, nbytes: int, *, new_series: int = 0) -> str | None:
        return "the disk is full" if self.is_full else None


def test_rows_that_the_disk_refuses_are_counted_and_harm_neither_records_nor_later_rows(
    tmp_path: Path,
) -> None:
    budget = Full()
    writer = MeasuredWriter(tmp_path, budget=budget)
    key = linear_key(quant_type="fp32")
    for step in range(3):
        budget.is_full = step == 1
        values = values_of(0, step)
        sequence = writer.put(key, "float32", values, iteration=step)
        writer.measure([sequence], key=key, values=values, iteration=step)
    writer.close()
    counted = writer.figures.read().records
    assert (counted["measured"], counted["not_stored"]) == (2, 1)
    store = capd.open(writer.run)
    assert store.totals().records == 3
    assert sorted(step for _, step in errors_in(store)) == [0, 2]
