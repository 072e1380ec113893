"""Formats of scaled elements: FP8, MX and NVFP4 differ in how a block gets its scale, the rest is here.

A family says what is stored for a block, by what its values are multiplied before they are rounded, and by what
afterwards. Input of 16 bits is widened to float32, exactly; float64 is rounded to float32 first.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Protocol

import torch

from capd_client.formats.blocks import pieces
from capd_client.formats.elements import ELEMENTS, Element, codes_of, decode_table, quantise
from capd_client.formats.spec import Spec

__all__ = [
    "BlockScales", "QuantisedRows", "Scaling", "decode_rows", "element_of", "encode_rows", "qdq_rows", "quantised_rows",
]  # fmt: skip


class BlockScales(NamedTuple):
    """Of one piece: what is stored, and what to multiply by before and after rounding, float32 [blocks, 1]."""

    stored: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


class Scaling(Protocol):
    """How a family scales one tensor; made once per tensor, so it may have looked at all of it."""

    def of(self, amax: torch.Tensor) -> BlockScales:
        """The scales of blocks whose largest magnitudes are `amax`, float32 [blocks, 1]; [] without blocks."""
        ...


def qdq_rows(
    rows: torch.Tensor, spec: Spec, scaling: Scaling, generator: Optional[torch.Generator]
) -> torch.Tensor:
    """Quantise and dequantise; of the dtype of `rows`."""
    out = torch.empty_like(rows)
    for piece in pieces(rows):
        out[piece] = quantised_rows(rows[piece].to(torch.float32), spec, scaling, generator).found
    return out


class QuantisedRows(NamedTuple):
    """What float32 values became, float32 [blocks, values of a block] ([values] without blocks), and their scales."""

    found: torch.Tensor
    amax: torch.Tensor
    scales: BlockScales


def quantised_rows(
    values: torch.Tensor, spec: Spec, scaling: Scaling, generator: Optional[torch.Generator]
) -> QuantisedRows:
    """Quantise and dequantise one piece, not yet rounded to another dtype. values: float32; amax: as the scales."""
    amax = _amax(values)
    scales = scaling.of(amax)
    return QuantisedRows(_on_grid(values, scales, spec, generator).mul_(scales.after), amax, scales)


def encode_rows(
    rows: torch.Tensor, spec: Spec, scaling: Scaling, generator: Optional[torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of the elements, uint8, and what is stored of each block."""
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    no_blocks = rows.new_zeros((0, 1) if rows.ndim > 1 else (), dtype=torch.float32)
    stored = [scaling.of(no_blocks).stored]  # its dtype, where there are no pieces
    for piece in pieces(rows):
        values = rows[piece].to(torch.float32)
        scales = scaling.of(_amax(values))
        codes[piece] = codes_of(_on_grid(values, scales, spec, generator), element_of(spec))
        stored.append(scales.stored)
    return codes, (torch.cat(stored) if rows.ndim > 1 else stored[0])


def decode_rows(codes: torch.Tensor, element: Element, after: torch.Tensor) -> torch.Tensor:
    """The values of codes, float32, times `after`: [blocks, 1], or [] without blocks."""
    table = decode_table(element, codes.device)
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for piece in pieces(codes):
        found = table.index_select(0, codes[piece].reshape(-1).to(torch.int32)).view(out[piece].shape)
        torch.mul(found, after[piece] if after.ndim else after, out=out[piece])
    return out


def element_of(spec: Spec) -> Element:
    return ELEMENTS[str(spec.elem)]


def _amax(values: torch.Tensor) -> torch.Tensor:
    return values.abs().amax(-1, keepdim=True) if values.ndim > 1 else values.new_zeros(())


def _on_grid(
    values: torch.Tensor, scales: BlockScales, spec: Spec, generator: Optional[torch.Generator]
) -> torch.Tensor:
    return quantise(
        values * scales.before,
        values,
        element_of(spec),
        spec.rounding,
        saturate=spec.saturate,
        generator=generator,
    )
