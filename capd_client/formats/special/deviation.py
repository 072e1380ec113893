"""MXFP4 with the scale of Quartet: a power of two from the standard deviation of a block.

    X = 2^⌊log2(c · σ + 1e-8)⌋        c = 2.92247856 / 6
    value = X · e2m1(V / X)           to nearest, limited to ±6

σ is the population's standard deviation of the 32 values, in float32. c makes the scale the one of least mean squared
error for normal values. Source: Castro et al., "Quartet", arXiv 2505.14669, and its repository at 00ccd38
(`quantizers/mxfp4`). A block with an Inf or a NaN has the scale NaN.
"""

from __future__ import annotations

import math
from typing import Optional

import torch

from capd_client.formats.elements import ELEMENTS, codes_of, quantise
from capd_client.formats.scales import e8m0_reciprocals, e8m0_values
from capd_client.formats.spec import Block, Spec
from capd_client.formats.special.quantiser import SpecialRows

__all__ = ["DeviationQuantiser", "clip_mask"]

_FACTOR = 2.92247856 / 6
_FLOOR = 1e-8
_E2M1 = ELEMENTS["e2m1"]
_NAN_BYTE, _LARGEST_BYTE = 255, 254
_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
# Within 2**-13 of a power of two, where float32 sums of up to 1024 values could be on either side.
_NEAR = 1 << 10
# With a larger mean, the difference from it has too few digits.
_MOST_MEANS = 16.0
# Squares of smaller deviations underflow.
_SURE_BYTE = 127 - 55


class DeviationQuantiser:
    """The quantiser of MXFP4 under `scale_mode="std"`."""

    global_scale: Optional[torch.Tensor] = None

    def __init__(self, spec: Spec) -> None:
        self._rounding = spec.rounding
        self.block: Block = spec.block

    def quantised(
        self, rows: torch.Tensor, generator: Optional[torch.Generator], *, codes: bool = False
    ) -> SpecialRows:
        """Quantise rows; see `SpecialQuantiser`."""
        stored = _bytes(rows)
        after = e8m0_values(stored)
        grid = quantise(rows * e8m0_reciprocals(stored), rows, _E2M1, self._rounding, generator=generator)
        found = grid * after
        own = codes_of(grid, _E2M1) if codes else None
        return SpecialRows(found, None, after, own, stored.to(torch.uint8))


def clip_mask(rows: torch.Tensor) -> torch.Tensor:
    """Return which values the scale does not clip, bool: Quartet passes gradients only through these.

    Args:
        rows: float32 [blocks, values of a block].
    """
    return (rows * e8m0_reciprocals(_bytes(rows))).abs() <= _E2M1.max_value


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """Return the byte of each block's scale, int32 [blocks, 1]."""
    if not rows.is_cpu or not rows.numel():
        return _exact_bytes(rows)
    mean = rows.mean(-1, keepdim=True)
    deviation = torch.linalg.vector_norm(rows - mean, dim=-1, keepdim=True).mul_(
        1 / math.sqrt(rows.shape[-1])
    )
    # torch's own deviation takes ten times as long. It decides where a rounding error could change the exponent.
    unsure = mean.abs() > _MOST_MEANS * deviation
    bits = deviation.mul_(_FACTOR).add_(_FLOOR).view(torch.int32)
    unsure |= ((bits + _NEAR) & _MANTISSA) < 2 * _NEAR
    exponents: torch.Tensor = bits >> _MANTISSA_BITS
    unsure |= (exponents >= _LARGEST_BYTE) | (exponents < _SURE_BYTE)
    if bool(unsure.any()):
        chosen = unsure.squeeze(-1)
        exponents[chosen] = _exact_bytes(rows[chosen])
    return exponents


def _exact_bytes(rows: torch.Tensor) -> torch.Tensor:
    wanted = rows.std(-1, correction=0, keepdim=True).mul_(_FACTOR).add_(_FLOOR)
    exponents = (wanted.view(torch.int32) >> _MANTISSA_BITS).clamp_(0, _LARGEST_BYTE)
    return torch.where(rows.isfinite().all(-1, keepdim=True), exponents, _NAN_BYTE)
