"""The error of a matrix product whose partial sums are kept in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from capd.analyze.error_sums import Errors
from capd.analyze.format_choice import FormatChoice
from capd.analyze.trends.sums import Floats, Number, Problems, TrendSums
from capd_client.formats.spec import FormatError

if TYPE_CHECKING:
    import torch

__all__ = ["ACCUMULATORS", "Accumulation", "Accumulator", "accumulated", "accumulations"]

MOST_ROWS, MOST_COLUMNS = 64, 256
"""The most rows and columns of a product that are computed, evenly chosen. The inner dimension is whole."""
_FLOAT32_DIGITS = 24


class Accumulator(NamedTuple):
    """How partial sums are kept.

    Attributes:
        digits: The significant bits of the sum, the leading one included.
        step: The products that are added at once, before the sum is rounded.
        promoted: The products after which the sum is added to one in float32 and begins anew; 0: never.
    """

    digits: int
    step: int = 128
    promoted: int = 0


ACCUMULATORS: Mapping[str, Accumulator] = MappingProxyType(
    {
        "fp32": Accumulator(_FLOAT32_DIGITS),
        "bf16": Accumulator(8),
        "14-bit": Accumulator(14),
        "14-bit promoted": Accumulator(14, 32, 128),
    }
)


@dataclass(slots=True)
class Accumulation(TrendSums):
    """The error of Y = X Wᵀ by its accumulator, against the same operands in float64.

    The products of `step` neighbours of the inner dimension are added exactly (in float64), then added to the sum,
    which is rounded to `digits` significant bits, to nearest, ties to even. "14-bit promoted" adds 32 products at a
    time, and moves its sum to float32 after every 128.

    Source: DeepSeek-V3, arXiv 2412.19437, section 3.3: the tensor cores of an H800 keep about 14 bits of a partial
    sum, and DeepSeek promotes it to float32 every 128 products, which are four instructions of 32. The hardware
    truncates; here sums are rounded, so the errors here are smaller and not biased.

    Attributes:
        calls: The products.
        errors: The errors of their values.
    """

    calls: int = 0
    errors: Errors = field(default_factory=Errors)

    def numbers(self) -> dict[str, Number]:
        """Return the error of the values of the products."""
        errors = self.errors
        peak = errors.max_abs / errors.absmax if errors.absmax else None
        return {
            "calls": self.calls,
            "values": errors.compared,
            "sqnr_db": errors.sqnr_db,
            "normalised_l2": errors.normalised_l2,
            "peak_error": peak,
        }


def accumulations(
    x: torch.Tensor, weight: torch.Tensor, choices: Sequence[FormatChoice]
) -> tuple[dict[str, Accumulation], Problems]:
    """Return the errors of one product by operands and accumulator ("mxfp8 14-bit", "captured bf16").

    Args:
        x: [tokens, in_features].
        weight: [out_features, in_features].
        choices: The formats of the operands, besides the operands as they were captured.

    Returns:
        The errors, and why some formats have none. Nothing if the shapes do not fit.
    """
    import torch

    from capd_client.formats.encoding import quantised

    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or not x.numel() * weight.numel():
        return {}, ["the shapes of its input and its weight are not those of one product"]
    operands = {"captured": (x, weight)}
    problems = []
    for choice in choices:
        try:
            # Every operand draws the same random bits for stochastic rounding.
            operands[choice.label] = (
                quantised(x, choice.spec, torch.Generator().manual_seed(0)),
                quantised(weight, choice.spec, torch.Generator().manual_seed(0)),
            )
        except FormatError as error:
            problems.append(f"{choice.label}: {error}")
    found = {}
    for label, pair in operands.items():
        a, b = _some(pair[0], MOST_ROWS), _some(pair[1], MOST_COLUMNS)
        exact = a @ b.T
        for name, accumulator in ACCUMULATORS.items():
            found[f"{label} {name}"] = _compared(exact, accumulated(a, b, accumulator))
    return found, problems


def accumulated(a: Floats, b: Floats, accumulator: Accumulator) -> Floats:
    """Return a bᵀ, whose partial sums an accumulator keeps.

    Args:
        a: float64 [rows, n].
        b: float64 [columns, n].
        accumulator: The accumulator.
    """
    shape = (a.shape[0], b.shape[0])
    total, upper = np.zeros(shape), np.zeros(shape)
    for start in range(0, a.shape[1], accumulator.step):
        part = slice(start, start + accumulator.step)
        total = _rounded(total + a[:, part] @ b[:, part].T, accumulator.digits)
        if accumulator.promoted and (start + accumulator.step) % accumulator.promoted == 0:
            upper, total = _rounded(upper + total, _FLOAT32_DIGITS), np.zeros(shape)
    return _rounded(upper + total, _FLOAT32_DIGITS) if accumulator.promoted else total


def _rounded(values: Floats, digits: int) -> Floats:
    """Return values with so many significant bits, ties to even. The exponent has no limit."""
    share, exponent = np.frexp(values)
    found: Floats = np.ldexp(np.rint(np.ldexp(share, digits)), exponent - digits)
    return found


def _some(values: torch.Tensor, most: int) -> Floats:
    import torch

    count = len(values)
    rows = torch.arange(min(count, most)) * count // min(count, most)
    found: Floats = values[rows].to(torch.float32).numpy().astype(np.float64)
    return found


def _compared(exact: Floats, found: Floats) -> Accumulation:
    is_finite = np.isfinite(exact)
    usable = is_finite & np.isfinite(found)
    errors = Errors(1, exact.size)
    errors.nan, errors.inf = int(np.isnan(exact).sum()), int(np.isinf(exact).sum())
    errors.lost = int((is_finite & ~usable).sum())
    errors.add_values(np.where(usable, exact, 0.0), np.where(usable, found, 0.0))
    return Accumulation(1, errors)
