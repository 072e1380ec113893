"""Encodes, decodes and quantises tensors in any format, once its options are settled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Optional

import torch
from torch.nn.functional import pad

from capd_client.formats.blocks import Layout, block_amax, finite_amax, pieces, slabs
from capd_client.formats.elements import ELEMENTS
from capd_client.formats.encoded import Encoded
from capd_client.formats.fp8 import Fp8Scaling, fp8_multipliers
from capd_client.formats.hif8 import hif8_codes, hif8_table, hif8_values
from capd_client.formats.legacy import (
    legacy_hif8_codes,
    legacy_hif8_values,
    legacy_mx_codes,
    legacy_mx_values,
)
from capd_client.formats.lookup import elementwise
from capd_client.formats.mx import MxScaling, mx_multipliers
from capd_client.formats.nvfp4 import Nvfp4Scaling, nvfp4_multipliers
from capd_client.formats.scaled import Scaling, decode_rows, encode_rows, qdq_rows, quantised_rows
from capd_client.formats.spec import FormatError, Spec
from capd_client.formats.special.eden import EDEN_GROUP
from capd_client.formats.special.find import special_quantiser
from capd_client.formats.special.hif4 import hif4_decoded
from capd_client.formats.special.quantiser import SpecialQuantiser, no_codes
from capd_client.formats.unscaled import DTYPES, unscaled

__all__ = [
    "QuantisedPiece", "decoded", "encoded_as", "extremes_of", "layout_of", "quantised", "quantised_pieces",
    "scaling_of",
]  # fmt: skip

_INPUTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@torch.no_grad()
def quantised(
    x: torch.Tensor,
    spec: Spec,
    generator: Optional[torch.Generator],
    extremes: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Quantise and dequantise x; see `capd_client.formats.qdq`.

    Args:
        x: The tensor, or a part of one that cuts no block.
        spec: The format.
        generator: Source of the random bits.
        extremes: For a part, the `extremes_of` all parts. None for a whole tensor.
    """
    values = _checked(x, spec)
    if spec.is_scaled:
        layout = layout_of(values, spec)
        rows = layout.rows(values)
        if spec.legacy:
            found = layout.join(legacy_mx_values(rows, spec))
        elif spec.is_special:
            special = special_quantiser(values.reshape(-1) if extremes is None else extremes, spec)
            found = layout.join(_special_rows(rows, spec, special, generator))
        else:
            scaling = scaling_of(rows if extremes is None else extremes, spec)
            # A copy in rows takes its own results, so that there is one copy less of a large tensor.
            own = rows if _is_copy(rows, x) else None
            found = layout.join(qdq_rows(rows, spec, scaling, generator, own))
    elif spec.rounding == "stochastic":
        found = _there_and_back(values, spec, generator)
    else:
        found = elementwise(values, _there_and_back, spec)
    return found.to(x.dtype)


def _is_copy(rows: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether rows of x have memory of their own. A compiler, which cannot trace this, reuses memory by itself."""
    if torch.compiler.is_compiling():
        return False
    return rows.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def extremes_of(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return what a scale of a whole tensor depends on: its largest magnitudes, finite and not, float32.

    Args:
        parts: The parts of the tensor, on the CPU.
    """
    found = [torch.zeros(())]
    for part in parts:
        for piece in pieces(part):
            low, high = (one.to(torch.float32) for one in torch.aminmax(part[piece]))
            largest = torch.maximum(-low, high)
            found.append(largest)
            if not bool(largest.isfinite()):
                found.append(finite_amax(part[piece]))
    return torch.stack(found)


@torch.no_grad()
def encoded_as(x: torch.Tensor, spec: Spec, generator: Optional[torch.Generator]) -> Encoded:
    """Quantise x into codes and scales; see `capd_client.formats.encode`."""
    values = _checked(x, spec)
    if not spec.is_scaled:
        if spec.rounding == "stochastic":
            payload = _codes(values, spec, generator)
        else:
            payload = elementwise(values, _codes, spec)
        payload = payload.view(torch.uint16) if spec.fmt in DTYPES else payload
        return Encoded(payload, None, None, spec.fmt)
    if spec.shrink is not None:
        raise no_codes(spec, "shrink")
    layout = layout_of(values, spec)
    rows = layout.rows(values)
    global_scale = None
    if spec.legacy:
        codes, stored = legacy_mx_codes(rows, spec)
    elif spec.is_special:
        special = special_quantiser(values.reshape(-1), spec)
        width = rows.shape[-1]
        found = special.quantised(_filled(rows.to(torch.float32), special), generator, codes=True)
        if found.codes is None:
            raise no_codes(spec, "these options")
        codes, stored, global_scale = found.codes[:, :width], found.stored, special.global_scale
    else:
        scaling = scaling_of(rows, spec)
        codes, stored = encode_rows(rows, spec, scaling, generator)
        global_scale = scaling.global_scale if isinstance(scaling, Nvfp4Scaling) else None
    return Encoded(
        layout.join(codes),
        layout.join_scales(stored),
        global_scale,
        spec.fmt,
        spec.elem,
        spec.block,
        spec.axis,
    )


@torch.no_grad()
def decoded(encoded: Encoded) -> torch.Tensor:
    """Return the values of codes and scales; see `capd_client.formats.decode`."""
    payload = encoded.payload
    if encoded.fmt in DTYPES:
        return payload.view(DTYPES[encoded.fmt]).to(torch.float32)
    if encoded.scale is None:
        table = hif8_table(payload.device)
        return table.index_select(0, payload.reshape(-1).to(torch.int32)).reshape(payload.shape)
    layout = Layout(payload.shape, encoded.axis, encoded.block)
    stored = layout.row_scales(encoded.scale)
    if encoded.fmt == "hif4":
        return layout.join(hif4_decoded(layout.rows(payload), stored))
    if encoded.fmt == "fp8":
        multipliers = fp8_multipliers(stored)
    elif encoded.fmt == "nvfp4":
        multipliers = nvfp4_multipliers(stored, encoded.global_scale)
    else:
        multipliers = mx_multipliers(stored)
    return layout.join(decode_rows(layout.rows(payload), ELEMENTS[str(encoded.elem)], multipliers))


class QuantisedPiece(NamedTuple):
    """Some values of a tensor and their quantised values, both float32.

    With blocks, `values` and `found` have the shape [blocks, values of a block]; zeros fill an incomplete block.
    `amax`, `after` and `stored` then have the shape [blocks, 1]. With one scale for the tensor, values are flat and
    scales are []. Without scales, values are flat and scales are None.

    Attributes:
        values: The values before quantising.
        found: The values after quantising and dequantising.
        amax: The largest magnitude of each block; NaN if the block holds one.
        after: The multiplier of the decoded elements, float32.
        stored: The scales as `Encoded` stores them.
        within: False for values that only fill a block; None if there is no fill.
    """

    values: torch.Tensor
    found: torch.Tensor
    amax: Optional[torch.Tensor] = None
    after: Optional[torch.Tensor] = None
    stored: Optional[torch.Tensor] = None
    within: Optional[torch.Tensor] = None


@torch.no_grad()
def quantised_pieces(
    x: torch.Tensor, spec: Spec, generator: Optional[torch.Generator] = None
) -> Iterator[QuantisedPiece]:
    """Return decode(encode(x)) piece by piece with its scales, in memory of a few pieces.

    The order of the pieces is not defined. Arguments and errors are those of `quantised`. The results are not rounded
    to x's dtype.
    """
    values = _checked(x, spec)
    if not spec.is_scaled:
        flat = values.reshape(-1)
        for piece in pieces(flat):
            some = flat[piece]
            yield QuantisedPiece(some.to(torch.float32), _nearest(some, spec, generator).to(torch.float32))
        return
    layout = layout_of(values, spec)
    if spec.is_special:
        yield from _special_pieces(values, layout, spec, generator)
        return
    scaling = None if spec.legacy else scaling_of(values.reshape(-1), spec)
    for slab in slabs(values, layout):
        own = Layout(slab.shape, layout.axis, spec.block)
        rows = own.rows(slab)
        within = own.rows(torch.ones_like(slab, dtype=torch.bool)) if rows.numel() > slab.numel() else None
        for piece in pieces(rows):
            found = _quantised_rows(rows[piece], spec, scaling, generator)
            yield found if within is None else found._replace(within=within[piece])


def _filled(rows: torch.Tensor, special: SpecialQuantiser) -> torch.Tensor:
    """Return rows as wide as the quantiser's block, filled with zeros. A tensor that ends before a block has less."""
    width = special.block if isinstance(special.block, int) else rows.shape[-1]
    return rows if rows.shape[-1] >= width else pad(rows, (0, width - rows.shape[-1]))


def _special_rows(
    rows: torch.Tensor, spec: Spec, special: SpecialQuantiser, generator: Optional[torch.Generator]
) -> torch.Tensor:
    """Quantise and dequantise rows, in their dtype."""
    out = torch.empty_like(rows)
    for piece in pieces(rows):
        values = _filled(rows[piece].to(torch.float32), special)
        out[piece] = special.quantised(values, generator).found[:, : rows.shape[-1]]
    return out


def _special_pieces(
    x: torch.Tensor, layout: Layout, spec: Spec, generator: Optional[torch.Generator]
) -> Iterator[QuantisedPiece]:
    """Yield the quantised pieces of a special quantiser, with a row for each block that has a scale."""
    special = special_quantiser(x.reshape(-1), spec)
    for slab in slabs(x, layout):
        own = Layout(slab.shape, layout.axis, special.block)
        rows = own.rows(slab)
        rows, within = (
            _filled(rows, special),
            _filled(own.rows(torch.ones_like(slab, dtype=torch.bool)), special),
        )
        for piece in pieces(rows):
            values = rows[piece].to(torch.float32)
            found = special.quantised(values, generator)
            shape = (len(found.after), -1)
            # The scale of hif4 is more than a number. Its E6M2 part is `after`.
            stored = found.after if spec.fmt == "hif4" else found.stored
            values = values.view(shape)
            amax = block_amax(values) if found.amax is None else found.amax
            yield QuantisedPiece(
                values, found.found.view(shape), amax, found.after, stored, within[piece].view(shape)
            )


def _quantised_rows(
    rows: torch.Tensor, spec: Spec, scaling: Optional[Scaling], generator: Optional[torch.Generator]
) -> QuantisedPiece:
    values = rows.to(torch.float32)
    if scaling is not None:
        found, amax, scales = quantised_rows(values, spec, scaling, generator)
        return QuantisedPiece(values, found, amax, scales.after, scales.stored)
    stored = legacy_mx_codes(rows, spec)[1]
    found = legacy_mx_values(rows, spec).to(torch.float32)
    return QuantisedPiece(values, found, block_amax(values), mx_multipliers(stored), stored)


def _checked(x: torch.Tensor, spec: Spec) -> torch.Tensor:
    if not isinstance(x, torch.Tensor) or x.dtype not in _INPUTS:
        given = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise FormatError(f"{spec.fmt} takes tensors of {', '.join(map(str, _INPUTS))}; it was given {given}")
    return x.detach().to(torch.float32) if x.dtype == torch.float64 else x.detach()


def layout_of(x: torch.Tensor, spec: Spec) -> Layout:
    """Return the blocks of x in a format with scales. Raises FormatError if x lacks the axis."""
    ndim = max(1, x.ndim)
    lowest = -min(2, ndim) if isinstance(spec.block, tuple) else -ndim
    axis = spec.axis - ndim if spec.axis >= 0 else spec.axis
    if not lowest <= axis < 0:
        which = (
            "one of the last two dimensions" if isinstance(spec.block, tuple) else f"{-ndim} to {ndim - 1}"
        )
        raise FormatError(
            f"axis of {spec.fmt} cannot be {spec.axis} for a tensor of shape {tuple(x.shape)}; allowed are {which}"
        )
    # A special quantiser may take several blocks at once.
    block = spec.outer or (EDEN_GROUP if spec.rounding == "eden" else spec.block)
    return Layout(x.shape, axis, block)


def scaling_of(rows: torch.Tensor, spec: Spec) -> Fp8Scaling | MxScaling | Nvfp4Scaling:
    """Return the scaling of a tensor. `rows` has all of its values, or each value that occurs once."""
    if spec.fmt == "fp8":
        return Fp8Scaling(spec, rows)
    return Nvfp4Scaling(spec, rows) if spec.fmt == "nvfp4" else MxScaling(spec)


def _there_and_back(x: torch.Tensor, spec: Spec, generator: Optional[torch.Generator] = None) -> torch.Tensor:
    """Return the values of an unscaled format, in x's dtype."""
    return _nearest(x, spec, generator).to(x.dtype)


def _nearest(x: torch.Tensor, spec: Spec, generator: Optional[torch.Generator]) -> torch.Tensor:
    """Return the values of an unscaled format, in the dtype of its computation."""
    if spec.fmt in DTYPES:
        return unscaled(x, spec, generator)
    return legacy_hif8_values(x, spec) if spec.legacy else hif8_values(x, spec, generator)


def _codes(x: torch.Tensor, spec: Spec, generator: Optional[torch.Generator] = None) -> torch.Tensor:
    """Return the codes of an unscaled format; 16-bit codes as int16."""
    if spec.fmt in DTYPES:
        return unscaled(x, spec, generator).view(torch.int16)
    if spec.legacy:
        return legacy_hif8_codes(x, spec)
    return hif8_codes(hif8_values(x, spec, generator))
