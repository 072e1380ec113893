"""HiFloat4 ("hif4"): 64 values share a scale and two levels of one-bit exponents, 4.5 bits per value.

A group has an E6M2 scale (8 bits), a bit for each 8 values, a bit for each 4, and 64 elements S1P2: a sign, and
magnitudes 0, 0.25 … 1.75. With V the largest magnitude of the group, V8 of 8 values and V4 of 4, in bfloat16 input:

    E = e6m2(bf16(V · bf16(1/7)))     limited to 2^-48 … 49152, to nearest, ties to even
    r = bf16(1 / E)
    a = 1 if V8 · r ≥ 4 else 0        b = 1 if V4 · r · 2^-a ≥ 2 else 0
    m = ⌊|x| · r · 2^-(a+b) · 4 + ½⌋ / 4, at most 1.75
    value = ± E · 2^(a+b) · m

`stochastic` adds a uniform number in [0, 1) instead of ½. The limit of 1.75 makes it biased where it cuts. Source:
"HiFloat4", arXiv 2602.11287, and the numpy reference `To_HiFX` in ddddwee1/HiFloat4, which equals this bit for bit on
finite values. A group with an Inf or a NaN has the scale NaN. The reference passes such elements on.
"""

from __future__ import annotations

from typing import Optional

import torch

from capd_client.formats.spec import Block, Spec
from capd_client.formats.special.quantiser import SpecialRows
from capd_client.formats.tables import cached

__all__ = ["Hif4Quantiser", "hif4_decoded"]

_GROUP = 64
_LEAST_EXPONENT, _MOST_SCALE = -48, 49152.0
_NAN_SCALE = 255
_LARGEST = 7


class Hif4Quantiser:
    """The quantiser of hif4."""

    global_scale: Optional[torch.Tensor] = None

    def __init__(self, spec: Spec) -> None:
        self.block: Block = _GROUP
        self._is_stochastic = spec.rounding == "stochastic"

    def quantised(
        self, rows: torch.Tensor, generator: Optional[torch.Generator], *, codes: bool = False
    ) -> SpecialRows:
        """Quantise rows; see `SpecialQuantiser`. Values are rounded to bfloat16 first."""
        values = rows.to(torch.bfloat16).to(torch.float32)
        parts = values.abs().view(-1, 8, 2, 4)
        by_four = parts.amax(-1, keepdim=True)
        by_eight = by_four.amax(-2, keepdim=True)
        amax = by_eight.amax(-3, keepdim=True)
        scale = _scales(amax)
        inverse = (1.0 / scale).to(torch.bfloat16).to(torch.float32)
        upper = (by_eight * inverse) >= 4
        lower = by_four * torch.where(upper, inverse * 0.5, inverse) >= 2
        levels = upper.to(torch.float32) + lower.to(torch.float32)
        power = torch.exp2(levels)
        steps = parts * (inverse / power) * 4.0
        if self._is_stochastic:
            noise = torch.rand(steps.shape, generator=generator, dtype=torch.float32, device=rows.device)
        else:
            noise = torch.full_like(steps, 0.5)
        steps = steps.add_(noise).floor_().clamp_(max=_LARGEST)
        finite = amax.isfinite()
        multiplier = torch.where(finite, scale * power, torch.nan)
        found = (steps * 0.25 * multiplier).view(values.shape).copysign_(values)
        stored = _stored(scale, finite, upper, lower)
        own = None
        if codes:
            own = steps.view(values.shape).to(torch.uint8) | (values.signbit().to(torch.uint8) << 3)
            own = torch.where(finite.view(-1, 1), own, 0)
        after = torch.where(finite, scale, torch.nan).view(-1, 1)
        return SpecialRows(found, amax.view(-1, 1), after, own, stored)


def _scales(amax: torch.Tensor) -> torch.Tensor:
    """Return the E6M2 scale of each group, float32."""
    seventh = torch.tensor(1 / 7, dtype=torch.bfloat16, device=amax.device).to(torch.float32)
    wanted = (amax * seventh).to(torch.bfloat16).to(torch.float32)
    wanted = wanted.nan_to_num(1.0, 1.0, 1.0).clamp(2.0**_LEAST_EXPONENT, _MOST_SCALE)
    # Two bits of mantissa stay: 1.5 * 2^23 of their steps has no bits for a fraction of a step.
    magic = ((wanted.view(torch.int32) & 0x7F800000) + (21 << 23)) | 0x400000
    offset = magic.view(torch.float32)
    return (wanted + offset) - offset


def _stored(
    scale: torch.Tensor, finite: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor
) -> torch.Tensor:
    """Return the scales as stored, int32 [groups, 1]: E6M2, then 8 bits of 8 values, then 16 bits of 4."""
    bits = scale.view(torch.int32)
    e6m2 = ((bits >> 23) - 127 - _LEAST_EXPONENT) << 2 | (bits >> 21 & 3)
    e6m2 = torch.where(finite, e6m2, _NAN_SCALE).view(-1, 1)
    eight, sixteen = _weights(scale.device)
    by_eight = (upper.view(-1, 8) * eight).sum(-1, keepdim=True, dtype=torch.int32)
    by_four = (lower.view(-1, 16) * sixteen).sum(-1, keepdim=True, dtype=torch.int32)
    return e6m2.to(torch.int32) | by_eight << 8 | by_four << 16


def hif4_decoded(codes: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Return the values of codes, float32.

    Args:
        codes: uint8 [groups, values of a group]: 64, or fewer where the tensor ends.
        stored: The scales as stored, int32 [groups, 1].
    """
    width = codes.shape[-1]
    e6m2 = stored & 0xFF
    scale = torch.exp2((e6m2 >> 2).to(torch.float32) + _LEAST_EXPONENT) * (
        1 + (e6m2 & 3).to(torch.float32) / 4
    )
    scale = torch.where(e6m2 == _NAN_SCALE, torch.nan, scale)
    eight, sixteen = _weights(codes.device)
    upper = ((stored >> 8 & eight) != 0).to(torch.float32).repeat_interleave(8, -1)[:, :width]
    lower = ((stored >> 16 & sixteen) != 0).to(torch.float32).repeat_interleave(4, -1)[:, :width]
    found = (codes & 7).to(torch.float32) * 0.25 * (scale * torch.exp2(upper + lower))
    return torch.where(codes >= 8, -found, found)


@cached
def _weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    eight = torch.tensor([1 << bit for bit in range(8)], dtype=torch.int32, device=device)
    return eight, torch.tensor([1 << bit for bit in range(16)], dtype=torch.int32, device=device)
