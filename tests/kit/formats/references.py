"""What other implementations made of some tensors (tests/kit/formats/golden)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch

__all__ = ["bf16_reference", "nibbles", "reference"]


@cache
def _arrays() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parent / "golden" / "references.npz", allow_pickle=False) as found:
        return dict(found)


def reference(name: str) -> torch.Tensor:
    return torch.from_numpy(_arrays()[name].copy())


def bf16_reference(name: str) -> torch.Tensor:
    return reference(name).view(torch.bfloat16)


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """The two codes of each byte, low nibble first."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
