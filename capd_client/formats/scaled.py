"""The common part of the formats with scaled elements: FP8, MX and NVFP4 differ only in how a block gets its scale.

A family defines the stored scale of a block and the multipliers before and after rounding. Input of 16 bits is
widened to float32, exactly. float64 is rounded to float32 first.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Protocol

import torch

from capd_client.formats.blocks import block_amax, pieces
from capd_client.formats.elements import ELEMENTS, Element, codes_of, decode_table, quantise
from capd_client.formats.spec import Spec

__all__ = [
    "BlockScales", "QuantisedRows", "Scaling", "decode_rows", "element_of", "encode_rows", "on_scales", "qdq_rows",
    "quantised_rows",
]  # fmt: skip


class BlockScales(NamedTuple):
    """The scales of one piece: as stored, and as multipliers before and after rounding, float32 [blocks, 1]."""

    stored: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


class Scaling(Protocol):
    """The scaling of one tensor by a family, made once per tensor and after a look at all of it."""

    def of(self, amax: torch.Tensor) -> BlockScales:
        """Return the scales of blocks whose largest magnitudes are `amax`, float32 [blocks, 1]; [] without blocks."""
        ...


def qdq_rows(
    rows: torch.Tensor,
    spec: Spec,
    scaling: Scaling,
    generator: Optional[torch.Generator],
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Quantise and dequantise rows, in their dtype, into `out`, which may be the rows themselves."""
    out = torch.empty_like(rows) if out is None else out
    for piece in pieces(rows):
        out[piece] = quantised_rows(rows[piece].to(torch.float32), spec, scaling, generator).found
    return out


class QuantisedRows(NamedTuple):
    """Quantised values, float32 [blocks, values of a block] ([values] without blocks), and their scales."""

    found: torch.Tensor
    amax: torch.Tensor
    scales: BlockScales


def quantised_rows(
    values: torch.Tensor, spec: Spec, scaling: Scaling, generator: Optional[torch.Generator]
) -> QuantisedRows:
    """Quantise and dequantise one piece of float32 values, without rounding to another dtype.

    Returns:
        The quantised values, and `amax` and scales, both float32 [blocks, 1]; [] without blocks.
    """
    amax = _amax(values)
    scales = scaling.of(amax)
    return QuantisedRows(on_scales(values, scales, spec, generator), amax, scales)


def on_scales(
    values: torch.Tensor, scales: BlockScales, spec: Spec, generator: Optional[torch.Generator] = None
) -> torch.Tensor:
    """Quantise and dequantise float32 values under given scales, which broadcast with them."""
    return _on_grid(values, scales, spec, generator).mul_(scales.after)


def encode_rows(
    rows: torch.Tensor, spec: Spec, scaling: Scaling, generator: Optional[torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of the elements, uint8, and the scales as stored, [blocks, 1]; [] without blocks."""
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    no_blocks = rows.new_zeros((0, 1) if rows.ndim > 1 else (), dtype=torch.float32)
    # The empty first entry sets the dtype if there are no pieces.
    stored = [scaling.of(no_blocks).stored]
    for piece in pieces(rows):
        values = rows[piece].to(torch.float32)
        scales = scaling.of(_amax(values))
        codes[piece] = codes_of(_on_grid(values, scales, spec, generator), element_of(spec))
        stored.append(scales.stored)
    return codes, (torch.cat(stored) if rows.ndim > 1 else stored[0])


def decode_rows(codes: torch.Tensor, element: Element, after: torch.Tensor) -> torch.Tensor:
    """Return the values of codes times `after`, float32.

    Args:
        codes: uint8 [blocks, values of a block], or [values] without blocks.
        element: The element of the codes.
        after: The multipliers, float32 [blocks, 1], or [] without blocks.
    """
    table = decode_table(element, codes.device)
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for piece in pieces(codes):
        found = table.index_select(0, codes[piece].reshape(-1).to(torch.int32)).view(out[piece].shape)
        torch.mul(found, after[piece] if after.ndim else after, out=out[piece])
    return out


def element_of(spec: Spec) -> Element:
    """Return the element of a format with scales."""
    return ELEMENTS[str(spec.elem)]


def _amax(values: torch.Tensor) -> torch.Tensor:
    return block_amax(values) if values.ndim > 1 else values.new_zeros(())


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
