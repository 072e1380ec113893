"""MXFP8, MXFP6 and MXFP4: 32 elements share one power of two, E8M0.

Sources: OCP Microscaling Formats (MX) Specification v1.0, §5.2 (formats), §5.3 (elements), §5.4 (scale), §6.3
(conversion); OCP 8-bit Floating Point Specification (OFP8) v1.0 for the FP8 elements.

| elem | format | max | smallest normal, subnormal | Inf, NaN |
|---|---|---|---|---|
| e4m3 | mxfp8 | 448 | 2^-6, 2^-9 | no Inf; NaN S.1111.111 |
| e5m2 | mxfp8 | 57344 | 2^-14, 2^-16 | Inf, NaN; quantising makes no Inf |
| e2m3 | mxfp6 | 7.5 | 1, 0.125 | none |
| e3m2 | mxfp6 | 28 | 0.25, 0.0625 | none |
| e2m1 | mxfp4 | 6 | 1, 0.5 | none |

A value is X * P, with X = 2**-127 … 2**127. `scale_mode` chooses the exponent of X (see `scales`). P is V / X, rounded
to nearest with ties to even (or as `rounding` says) and limited to ±max. Under floor and even, elements above max * X
saturate (§6.3). Zeros keep their sign.

`shrink` multiplies values before rounding and divides them after. A floor scale leaves magnitudes below 8, which 0.75
makes at most 6, so stochastic rounding never clips them (Tseng et al., arXiv 2502.20586).

A block with an Inf or a NaN has the scale NaN, so all of it decodes to NaN. The specification leaves this open (§6.3);
torchao and microxcaling do the same. A block of zeros has the scale 2**-127. A decoded value beyond float32 is Inf.
Only a scale mode that rounds up can make one, from a magnitude in the last binade.
"""

from __future__ import annotations

import torch

from capd_client.formats.scaled import BlockScales, element_of
from capd_client.formats.scales import e8m0_bytes, e8m0_reciprocals, e8m0_values
from capd_client.formats.spec import Spec

__all__ = ["MxScaling", "mx_multipliers"]


class MxScaling:
    """The scaling of one tensor: a power of two for each block."""

    def __init__(self, spec: Spec) -> None:
        self._element = element_of(spec)
        self._mode = str(spec.scale_mode)
        self._shrink = spec.shrink or 1.0

    def of(self, amax: torch.Tensor) -> BlockScales:
        found = e8m0_bytes(amax, self._element, self._mode)
        before, after = e8m0_reciprocals(found), e8m0_values(found)
        if self._shrink != 1.0:
            before, after = before * self._shrink, after * (1.0 / self._shrink)
        return BlockScales(found.to(torch.uint8), before, after)


def mx_multipliers(stored: torch.Tensor) -> torch.Tensor:
    """Return the multipliers of decoded elements, float32, from the stored bytes."""
    return e8m0_values(stored)
