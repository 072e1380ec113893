"""What encoding gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from capd_client.formats.spec import Block

if TYPE_CHECKING:
    import torch

__all__ = ["Encoded"]


@dataclass(frozen=True)
class Encoded:
    """A tensor in a number format: `payload`, `scale` and `global_scale`, and what is needed to read them.

    payload: of the tensor's shape, a code per element: uint8 (fp6 and fp4 not packed: 0 … 63, 0 … 15), uint16 for bf16
    and fp16. scale: one per block, as stored: E8M0 bytes (mx), E4M3 bytes (nvfp4), both uint8, or float32 (fp8), always
    multiplied when decoding; the tensor's shape with each blocked axis divided by the block, rounded up; [] for a
    scale of the whole tensor; None without scales. global_scale: nvfp4's float32 [], else None.
    """

    payload: torch.Tensor
    scale: Optional[torch.Tensor]
    global_scale: Optional[torch.Tensor]
    fmt: str
    elem: Optional[str] = None
    block: Block = None
    axis: int = -1
