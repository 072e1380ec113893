"""FP8 with float32 scales: one for a tensor, for 128 values, or for a tile of 128x128.

Sources: OCP 8-bit Floating Point Specification (OFP8) v1.0 for the elements; TransformerEngine for per-tensor current
scaling and block scaling (`recipe_common.cuh`, `compute_scale_from_amax`; Float8CurrentScaling, Float8BlockScaling);
the DeepSeek-V3 report (arXiv 2412.19437, §3.3.2) for 1x128 activations and 128x128 weights.

Elements: e4m3 has max 448, smallest subnormal 2^-9, no Inf, NaN S.1111.111. e5m2 has max 57344, smallest subnormal
2^-16, Inf S.11111.00, NaN. Rounding is to nearest with ties to even, or as `rounding` says. Zeros keep their sign, and
NaN stays NaN.

Scale, by `scale_mode`:

- `exact`: values are multiplied by S = float32(max / amax); the quotient is computed in float64. The stored scale is
  1 / S, so decoding multiplies by it (torchao's Float8TrainingTensor stores S). S is 1 if amax is 0, Inf or NaN. If
  S overflows float32, it is the largest float32.
- `floor`, `ceil`, `even`, `rceil`: the stored scale is the power of two that MX would choose (see `scales`).
- `unit`: the scale is 1, as in a plain cast.

`amax_epsilon` replaces a smaller amax, 0 included, before the scale is computed. TransformerEngine's Float8BlockScaling
has it with the default 0, and DeepSeek-V3's `inference/kernel.py` (`act_quant`) with 1e-4. The latter divides values
by s = max(amax, 1e-4) / 448, which may differ from 1 / S in the last bit.

`overflow`, for magnitudes beyond max, Inf included: `saturate` makes them ±max. `inf` makes them Inf in e5m2 and NaN
in e4m3. These are the two conversion modes of OFP8.
"""

from __future__ import annotations

import torch

from capd_client.formats.blocks import pieces
from capd_client.formats.scaled import BlockScales, element_of
from capd_client.formats.scales import e8m0_bytes, e8m0_reciprocals, e8m0_values
from capd_client.formats.spec import Spec

__all__ = ["Fp8Scaling", "fp8_multipliers"]

_FLOAT32_MAX = torch.finfo(torch.float32).max


class Fp8Scaling:
    """The scaling of one tensor: a float32 for each block, or one for all of `rows` if there are no blocks."""

    def __init__(self, spec: Spec, rows: torch.Tensor) -> None:
        self._element = element_of(spec)
        self._mode = spec.scale_mode
        self._epsilon = spec.amax_epsilon
        self._whole = self._from_amax(_amax(rows)) if spec.block is None else None

    def of(self, amax: torch.Tensor) -> BlockScales:
        return self._from_amax(amax) if self._whole is None else self._whole

    def _from_amax(self, amax: torch.Tensor) -> BlockScales:
        if self._epsilon is not None:
            # NaN stays.
            amax = amax.clamp(min=self._epsilon)
        usable = amax.isfinite() & (amax != 0)
        if self._mode == "exact":
            wide = amax.to(torch.float64)
            # Both are tensors, because torch divides a number by a tensor as number * rounded reciprocal.
            exact = (torch.full_like(wide, self._element.max_value) / wide).to(torch.float32)
            before = torch.where(usable, exact.clamp(max=_FLOAT32_MAX), 1.0)
            after = 1.0 / before
        elif self._mode == "unit":
            before = after = torch.ones_like(amax)
        else:
            found = e8m0_bytes(amax, self._element, str(self._mode))
            before = torch.where(usable, e8m0_reciprocals(found), 1.0)
            after = torch.where(usable, e8m0_values(found), 1.0)
        return BlockScales(after, before, after)


def _amax(values: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, float32 []; NaN if a value is NaN."""
    found = torch.zeros((), dtype=torch.float32, device=values.device)
    for piece in pieces(values):
        found = torch.maximum(found, values[piece].to(torch.float32).abs().amax())
    return found


def fp8_multipliers(stored: torch.Tensor) -> torch.Tensor:
    """Return the multipliers of decoded elements, which are the stored scales."""
    return stored
