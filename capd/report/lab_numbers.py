"""What was measured while capturing, as plain values for `capd compare --lab` (docs/json.md)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from capd.report.gather import GatheredRecords
from capd.report.measured import NOT_MEASURED, OUTSIDE_SAMPLE

__all__ = ["lab_numbers"]


def lab_numbers(gathered: GatheredRecords) -> dict[str, Any]:
    """Return the samples, and how many records of them were measured."""
    without = Counter[str]()
    for (_, reason), count in gathered.unmeasured.items():
        without[reason] += count
    measured = gathered.groups.whole().records - without.total()
    return {
        "samples": sorted(gathered.error_samples),
        "measured": measured,
        "in_sample": measured + without[NOT_MEASURED],
        "outside": without[OUTSIDE_SAMPLE],
    }
