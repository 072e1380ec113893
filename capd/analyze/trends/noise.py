"""The ratio of a gradient's norm to the noise that its quantisation adds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from capd.analyze.error_sums import Errors
from capd.analyze.exact import rounded
from capd.analyze.format_choice import FormatChoice
from capd.analyze.trends.sums import Number, Problems, TrendSums, share_of_all
from capd_client.formats.spec import FormatError

if TYPE_CHECKING:
    import torch

__all__ = ["NOISE_LIMIT", "NoiseRatio", "noise_ratios"]

NOISE_LIMIT = math.sqrt(3)
"""Below √3, training with the quantised gradient is less effective (FP4 All the Way, arXiv 2505.19115)."""


@dataclass(slots=True)
class NoiseRatio(TrendSums):
    """‖g‖ / (σ_q √N), where σ_q² = mean d², d = y - g the error of the format, and N the number of values.

    Source: "FP4 All the Way: Fully Quantized Training of LLMs", arXiv 2505.19115: quantised training becomes
    less effective when the ratio of the gradient falls below about √3. σ_q √N is ‖d‖, so the ratio is √(Σg² / Σd²),
    or 10^(SQNR / 20). The ratio of several tensors is that of their concatenation.

    Attributes:
        records: The tensors with a finite ratio.
        below: Those of them whose own ratio is below √3.
        errors: The sums of the format's error.
    """

    records: int = 0
    below: int = 0
    errors: Errors = field(default_factory=Errors)

    @property
    def ratio(self) -> float | None:
        """√(Σg² / Σd²), Inf without an error, None for zeros alone."""
        sums = self.errors.sums
        if not sums.d2:
            return math.inf if sums.x2 else None
        return math.sqrt(sums.x2 / sums.d2)

    def numbers(self) -> dict[str, Number]:
        """Return `ratio`, its parts `norm` and `noise_std` (σ_q), `values` (N) and the share of tensors below √3."""
        return {
            "values": self.errors.compared,
            "ratio": self.ratio,
            "norm": math.sqrt(rounded(self.errors.sums.x2)),
            "noise_std": self.errors.rmse,
            "below_percent": share_of_all(self.below, self.records),
        }


def noise_ratios(
    values: torch.Tensor, choices: Sequence[FormatChoice]
) -> tuple[dict[str, NoiseRatio], Problems]:
    """Return the ratio of one tensor in each format, by the format's label, and why others have none."""
    from capd.analyze.measure import errors_of

    found, problems = {}, []
    for choice in choices:
        try:
            errors = errors_of(values, choice)
        except FormatError as error:
            problems.append(f"{choice.label}: {error}")
            continue
        one = NoiseRatio(errors=errors)
        ratio = one.ratio
        if ratio is not None:
            one.records, one.below = 1, int(ratio < NOISE_LIMIT)
        found[choice.label] = one
    return found, problems
