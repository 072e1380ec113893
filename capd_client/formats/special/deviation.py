"""MXFP4 with the scale of Quartet: a power of two from the standard deviation of a block.

    X = 2^⌊log2(c · σ + 1e-8)⌋        c = 2.92247856 / 6
    value = X · e2m1(V / X)           to nearest, limited to ±6

σ is the population's standard deviation of the 32 values, in float32. c makes the scale the one of least mean squared
error for normal values. Source: Castro et al., "Quartet", arXiv 2505.14669, and its repository at 00ccd38
(`quantizers/mxfp4`). A block with an Inf or a NaN has the scale NaN.
"""

from __future__ import annotations

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
        return SpecialRows(found, rows.abs().amax(-1, keepdim=True), after, own, stored.to(torch.uint8))


def clip_mask(rows: torch.Tensor) -> torch.Tensor:
    """Return which values the scale does not clip, bool: Quartet passes gradients only through these.

    Args:
        rows: float32 [blocks, values of a block].
    """
    return (rows * e8m0_reciprocals(_bytes(rows))).abs() <= _E2M1.max_value


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """Return the byte of each block's scale, int32 [blocks, 1]."""
    wanted = rows.std(-1, correction=0, keepdim=True).mul_(_FACTOR).add_(_FLOOR)
    exponents = (wanted.view(torch.int32) >> 23).clamp_(0, _LARGEST_BYTE)
    return torch.where(rows.isfinite().all(-1, keepdim=True), exponents, _NAN_BYTE)
