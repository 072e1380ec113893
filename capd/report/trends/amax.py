"""The largest magnitude of a record, from its elements or from its stored statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from capd.analyze.trends.amax_history import AmaxRecord
from capd.analyze.trends.sums import Problems
from capd.io.items import Loaded

if TYPE_CHECKING:
    import torch

__all__ = ["amax_record"]


def amax_record(loaded: Loaded, values: torch.Tensor | None) -> tuple[AmaxRecord | None, Problems]:
    """Return the largest finite magnitude of a record, with all magnitudes if its elements were read.

    float64 is rounded to float32, as in the formats. Without elements and statistics, and without a finite value, there
    is none, and the reason.
    """
    import torch

    if values is not None:
        magnitude = values.detach().to(torch.float32).abs().reshape(-1).numpy()
        magnitude = magnitude[np.isfinite(magnitude)]
        if magnitude.size:
            return AmaxRecord(float(magnitude.max()), magnitude), []
        return None, ["it has no finite value"]
    if loaded.stats is None:
        return None, ["it has no stored statistics, and its elements were not read"]
    if loaded.stats.absmax is None:
        return None, ["it has no finite value"]
    return AmaxRecord(float(loaded.stats.absmax), None), []
