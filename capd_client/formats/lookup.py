"""Computes elementwise formats of 16-bit input by table.

A table holds the result of the format's own function for each of the 65,536 bit patterns, so it is exact by
construction. Reading it is several times faster than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from capd_client.formats.blocks import pieces
from capd_client.formats.spec import Spec
from capd_client.formats.tables import cached

__all__ = ["elementwise"]

Function = Callable[[torch.Tensor, Spec], torch.Tensor]

PATTERNS = 1 << 16


def elementwise(x: torch.Tensor, function: Function, spec: Spec) -> torch.Tensor:
    """Return function(x, spec), in x's shape.

    Args:
        x: A tensor of any dtype. Only 16-bit dtypes use a table.
        function: A deterministic function that works element by element and returns 8 or 16 bits per element.
        spec: The format.
    """
    if x.element_size() != 2:
        return function(x, spec)
    values = x.contiguous().reshape(-1)
    table = _table(function, spec, x.dtype, x.device)
    out = torch.empty(values.shape, dtype=table.dtype, device=x.device)
    for piece in pieces(values):
        patterns = values[piece].view(torch.int16).to(torch.int32).bitwise_and_(PATTERNS - 1)
        torch.index_select(table, 0, patterns, out=out[piece])
    return out.reshape(x.shape)


@cached
def _table(function: Function, spec: Spec, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    patterns = torch.arange(PATTERNS, dtype=torch.int32, device=device).to(torch.int16)
    return function(patterns.view(dtype), spec)
