"""The result of encoding a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from capd_client.formats.spec import Block

if TYPE_CHECKING:
    import torch

__all__ = ["Encoded"]


@dataclass(frozen=True)
class Encoded:
    """A tensor in a number format: its codes, its scales, and the options that decoding needs.

    Attributes:
        payload: One code per element, in the tensor's shape. uint16 for bf16 and fp16, else uint8; fp6 and fp4 are not
            packed (0 … 63, 0 … 15).
        scale: One per block, as stored: E8M0 bytes (mx) and E4M3 bytes (nvfp4) as uint8, float32 for fp8. Decoding
            multiplies by the scale. Its shape is the tensor's with each blocked axis divided by the block, rounded up;
            [] for one scale of the whole tensor. None for formats without scales.
        global_scale: The float32 [] of nvfp4; None for other formats.
        fmt, elem, block, axis: The options of `capd_client.formats.encode`.
    """

    payload: torch.Tensor
    scale: Optional[torch.Tensor]
    global_scale: Optional[torch.Tensor]
    fmt: str
    elem: Optional[str] = None
    block: Block = None
    axis: int = -1
