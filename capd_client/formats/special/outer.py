"""NVFP4 under float32 scales of 128 values instead of one for the tensor, as TetraJet-v2 has it.

    o = amax_128 / 448 / 6                     1 where amax_128 is 0
    s = e4m3(amax_16 / 6 / o)                  to nearest; 2^-9 instead of 0 under stochastic rounding
    value = e2m1(x · (1 / (s · o))) · (s · o)

Source: "TetraJet-v2", arXiv 2510.27527, and its repository at ca5953f (`nvfp4_quant_fused_kernel.py`). The order of
the divisions, and the product with the reciprocal, are capd's own reading. A group of 128 with an Inf or a NaN is NaN.
"""

from __future__ import annotations

from typing import Optional

import torch

from capd_client.formats.blocks import block_amax
from capd_client.formats.elements import ELEMENTS, codes_of, quantise
from capd_client.formats.spec import Block, Spec
from capd_client.formats.special.quantiser import SpecialRows, no_codes

__all__ = ["OuterQuantiser"]

_E2M1, _E4M3 = ELEMENTS["e2m1"], ELEMENTS["e4m3"]
_FLOAT32_MAX = torch.finfo(torch.float32).max
_SMALLEST = 2.0**-9


class OuterQuantiser:
    """The quantiser of NVFP4 under `outer`."""

    global_scale: Optional[torch.Tensor] = None

    def __init__(self, spec: Spec) -> None:
        self.block: Block = spec.outer
        self._spec = spec

    def quantised(
        self, rows: torch.Tensor, generator: Optional[torch.Generator], *, codes: bool = False
    ) -> SpecialRows:
        """Quantise rows; see `SpecialQuantiser`. Raises FormatError for `codes`."""
        if codes:
            raise no_codes(self._spec, "outer")
        blocks = rows.view(len(rows), -1, 16)
        amax = block_amax(blocks)
        whole = amax.amax(1, keepdim=True)
        outer = whole / torch.full_like(whole, _E4M3.max_value) / torch.full_like(whole, _E2M1.max_value)
        outer = torch.where(whole == 0, 1.0, outer)
        wanted = amax / torch.full_like(amax, _E2M1.max_value) / outer
        scale = quantise(wanted.clone(), wanted, _E4M3, "even")
        if self._spec.rounding == "stochastic":
            scale = torch.where(scale == 0, _SMALLEST, scale)
        after = torch.where(whole.isfinite(), scale * outer, torch.nan)
        before = (1.0 / after).clamp(max=_FLOAT32_MAX)
        grid = quantise(blocks * before, blocks, _E2M1, self._spec.rounding, generator=generator)
        found = grid.mul_(after).view(rows.shape)
        return SpecialRows(
            found, amax.view(-1, 1), after.reshape(-1, 1), None, codes_of(scale, _E4M3).view(-1, 1)
        )
