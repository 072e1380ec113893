"""Measures the errors of formats on one tensor, by the same functions as `capd compare`. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from capd.analyze.distribution import distribution_of
from capd.analyze.error_sums import Errors
from capd.analyze.format_choice import FormatChoice
from capd.analyze.measure import measure_each
from capd.store.read.series import tensor_of

__all__ = ["measured_bits"]


def measured_bits(
    bits: NDArray[np.generic], dtype: str, choices: Sequence[FormatChoice]
) -> tuple[dict[str, Errors], list[str]]:
    """Return the errors of each format on stored bits, and why some formats do not take the tensor."""
    return measure_each(tensor_of(bits, dtype), distribution_of(bits, dtype), choices)
