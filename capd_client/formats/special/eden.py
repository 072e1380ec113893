"""NVFP4 with MS-EDEN: elements round to nearest, and the scales of blocks round at random so that the mean is right.

The values must have been transformed before (Hadamard with random signs, size 128). With v = 6 · 16/17:

    o = amax_t / 255.99 / v                     1 where amax_t is 0
    s = e4m3(amax_16 / v / o)                   1 where this is 0
    q = e2m1(x / (s · o))                       to nearest, ties away from zero
    f = Σ x'² / Σ x' · q                        over 128 values, with x' = x / (s · o); 1 where the divisor is 0
    value = q · e4m3_stochastic(s · f) · o

Sources: "Quartet II", arXiv 2601.22813, and its repository at 8776a90: `quantizers/eden.py` has the bound v, and
`schemes/quartet_2.py` the largest scale 255.99, the neighbours of a scale and the ties. The latter multiplies 17/16 by
0.93, for which no reason is public; it is left out. How the scales' random bits are drawn there is not public either.
"""

from __future__ import annotations

from typing import Optional

import torch

from capd_client.formats.blocks import block_amax, finite_amax
from capd_client.formats.elements import ELEMENTS, codes_of, quantise
from capd_client.formats.spec import Block, Spec
from capd_client.formats.special.quantiser import SpecialRows, no_codes

__all__ = ["EDEN_GROUP", "EdenQuantiser"]

EDEN_GROUP = 128
"""The number of values that share a correction, which is the size of the transform before."""

_E2M1, _E4M3 = ELEMENTS["e2m1"], ELEMENTS["e4m3"]
_LARGEST_SCALE = 255.99
_LARGEST_VALUE = 6 * 16 / 17


class EdenQuantiser:
    """The quantiser of NVFP4 under `rounding="eden"`."""

    global_scale: Optional[torch.Tensor] = None
    block: Block = EDEN_GROUP

    def __init__(self, spec: Spec, values: torch.Tensor) -> None:
        self._spec = spec
        amax = finite_amax(values)
        outer = amax / torch.full_like(amax, _LARGEST_SCALE) / torch.full_like(amax, _LARGEST_VALUE)
        self._outer = torch.where(amax == 0, 1.0, outer)

    def quantised(
        self, rows: torch.Tensor, generator: Optional[torch.Generator], *, codes: bool = False
    ) -> SpecialRows:
        """Quantise rows; see `SpecialQuantiser`. Raises FormatError for `codes`."""
        if codes:
            raise no_codes(self._spec, "rounding='eden'")
        blocks = rows.view(len(rows), -1, 16)
        amax = block_amax(blocks)
        wanted = amax / torch.full_like(amax, _LARGEST_VALUE) / self._outer
        scale = quantise(wanted.clone(), wanted, _E4M3, "even")
        scale = torch.where(scale == 0, 1.0, scale)
        scaled = blocks / (scale * self._outer)
        grid = quantise(scaled.clone(), scaled, _E2M1, "away")
        scaled, lines = scaled.view(rows.shape), grid.view(rows.shape)
        own = (scaled * scaled).sum(-1, keepdim=True)
        mixed = (scaled * lines).sum(-1, keepdim=True)
        factor = torch.where(mixed == 0, 1.0, own / mixed).unsqueeze(-1)
        corrected = scale * factor
        drawn = quantise(corrected.clone(), corrected, _E4M3, "stochastic", generator=generator)
        after = torch.where(amax.isfinite(), drawn * self._outer, torch.nan)
        found = grid.mul(after).view(rows.shape)
        return SpecialRows(
            found, amax.view(-1, 1), after.reshape(-1, 1), None, codes_of(drawn, _E4M3).view(-1, 1)
        )
