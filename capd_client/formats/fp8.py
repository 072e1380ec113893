"""FP8 with float32 scales: one for a tensor, for 128 values, or for a tile of 128x128.

Source: elements, OCP 8-bit Floating Point Specification (OFP8) v1.0; per-tensor current scaling and block scaling as
TransformerEngine computes them (`recipe_common.cuh`, `compute_scale_from_amax`; Float8CurrentScaling,
Float8BlockScaling); 1x128 for activations and 128x128 for weights as in the DeepSeek-V3 report (arXiv 2412.19437,
§3.3.2).

Elements: e4m3, max 448, smallest subnormal 2^-9, no Inf, NaN S.1111.111; e5m2, max 57344, smallest subnormal 2^-16,
Inf S.11111.00, NaN. Rounding to nearest, ties to even, or as `rounding` says. Zeros keep their sign, NaN stays NaN.

Scale: `exact`: values are multiplied by S = float32(max / amax), in float64 before that, and 1 / S is what is stored,
so stored scales multiply when decoding (torchao's Float8TrainingTensor stores S). An amax that is 0, Inf or NaN gives
S = 1; S that overflows float32 is its largest number. `floor`, `ceil`, `even`, `rceil`: the stored scale is the power
of two that MX would choose (`scales`); `unit`: 1, a plain cast. `overflow`: what lies beyond max, Inf included,
becomes ±max under `saturate`, under `inf` Inf in e5m2 and NaN in e4m3 (OFP8's two modes of conversion).
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
    """A float32 for each block, or without blocks one for all of `rows`."""

    def __init__(self, spec: Spec, rows: torch.Tensor) -> None:
        self._element = element_of(spec)
        self._mode = spec.scale_mode
        self._whole = self._from_amax(_amax(rows)) if spec.block is None else None

    def of(self, amax: torch.Tensor) -> BlockScales:
        return self._from_amax(amax) if self._whole is None else self._whole

    def _from_amax(self, amax: torch.Tensor) -> BlockScales:
        usable = amax.isfinite() & (amax != 0)
        if self._mode == "exact":
            wide = amax.to(torch.float64)
            # Between two tensors: a number divided by a tensor is multiplied by its rounded reciprocal in torch.
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
    """The largest magnitude, NaN where there is one, float32 []."""
    found = torch.zeros((), dtype=torch.float32, device=values.device)
    for piece in pieces(values):
        found = torch.maximum(found, values[piece].to(torch.float32).abs().amax())
    return found


def fp8_multipliers(stored: torch.Tensor) -> torch.Tensor:
    """What decoded elements are multiplied by: the stored scales themselves."""
    return stored
