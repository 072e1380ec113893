"""NVFP4 with four over six: each block maps its largest magnitude to 6 or to 4, whichever has the smaller error.

    S = 256 · 6 / amax_t                           256 leaves room for the larger scale
    s_6 = e4m3(amax_b / 6 · S)    s_4 = e4m3(amax_b / 6 · S · 1.5)
    value = e2m1(x / (s / S)) · (s / S)

The error is that of e2m1 · s · amax_t / (6 · 256) against x, summed in float32 from left to right. Its terms are
absolute or squared. Equal errors take s_6. A tile of 16x16 sums its rows as a tree: rows 8 apart, then 4, 2, 1.
Sources: Cook et al., "Four Over Six", arXiv 2512.02010; TransformerEngine's `NVFP4QuantizerRef`, which equals this bit
for bit.
"""

from __future__ import annotations

from typing import Optional

import torch

from capd_client.formats.blocks import finite_amax
from capd_client.formats.elements import ELEMENTS, codes_of, quantise
from capd_client.formats.spec import Block, Spec
from capd_client.formats.special.quantiser import SpecialRows

__all__ = ["FourOverSixQuantiser"]

_E2M1, _E4M3 = ELEMENTS["e2m1"], ELEMENTS["e4m3"]
_FLOAT32_MAX = torch.finfo(torch.float32).max
_BOUND, _WIDTH = 256.0, 16
_MAGNITUDE = 0x7FFFFFFF


class FourOverSixQuantiser:
    """The quantiser of NVFP4 under `four_over_six`."""

    def __init__(self, spec: Spec, values: torch.Tensor) -> None:
        self.block: Block = spec.block
        self._squared = spec.four_over_six == "mse"
        self._rounding = spec.rounding
        amax = finite_amax(values)
        encode = (torch.full_like(amax, _BOUND * _E2M1.max_value) / amax).clamp(max=_FLOAT32_MAX)
        self._encode = torch.where(amax == 0, 1.0, encode)
        self._amax = amax
        self._decode = 1.0 / self._encode
        self.global_scale: Optional[torch.Tensor] = self._decode

    def quantised(
        self, rows: torch.Tensor, generator: Optional[torch.Generator], *, codes: bool = False
    ) -> SpecialRows:
        """Quantise rows; see `SpecialQuantiser`."""
        # One line for each place of a block: sums and scales of blocks are then those of whole vectors.
        lines = rows.t().contiguous()
        amax = lines.view(torch.int32).bitwise_and(_MAGNITUDE).amax(0).view(torch.float32)
        base = amax / torch.full_like(amax, _E2M1.max_value) * self._encode
        six, four = self._candidate(lines, base), self._candidate(lines, base * 1.5)
        is_four = self._error(lines, *four) < self._error(lines, *six)
        scale = torch.where(is_four, four[1], six[1])
        scale = torch.where(amax.isfinite(), scale, torch.nan)
        after = scale * self._decode
        grid = _chosen(is_four, four[0], six[0])
        own = codes_of(grid, _E2M1).t().contiguous() if codes else None
        found = grid.mul_(after).t().contiguous()
        return SpecialRows(
            found, amax.view(-1, 1), after.view(-1, 1), own, codes_of(scale, _E4M3).view(-1, 1)
        )

    def _candidate(self, lines: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elements and the scale of each block, for a wanted scale."""
        scale = quantise(wanted.clone(), wanted, _E4M3, "even")
        before = (1.0 / (scale * self._decode)).clamp(max=_FLOAT32_MAX)
        return quantise(lines * before, lines, _E2M1, self._rounding), scale

    def _error(self, lines: torch.Tensor, grid: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the error of each block, float32 [blocks]."""
        divisor = torch.full_like(self._amax, _BOUND * _E2M1.max_value)
        off = grid.mul(scale).mul_(self._amax).div_(divisor).sub_(lines)
        terms = off.square_() if self._squared else off.abs_()
        total, *columns = terms.view(-1, _WIDTH, terms.shape[-1]).unbind(1)
        for column in columns:
            total = total + column
        while len(total) > 1:
            half = len(total) // 2
            total = total[:half] + total[half:]
        return total.squeeze(0)


def _chosen(is_one: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the columns of `one` where they are chosen, else those of `other`. It is as `torch.where`, but faster."""
    a, b = one.view(torch.int32), other.view(torch.int32)
    return a.bitwise_xor(b).bitwise_and_(is_one.to(torch.int32).neg_()).bitwise_xor_(b).view(torch.float32)
