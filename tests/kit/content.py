"""Deterministic captures: number n of a rank is always the same tensor, so that any process can check it."""

from __future__ import annotations

import numpy as np
import torch

KINDS = 4


def tensor(rank: int, n: int) -> torch.Tensor:
    """Capture `n` of a rank: small, large, scalar and ragged ones in turn."""
    generator = np.random.Generator(np.random.PCG64([rank, n]))
    kind = n % KINDS
    if kind == 0:
        return torch.from_numpy(generator.standard_normal((16, 16), dtype=np.float32)).to(torch.bfloat16)
    if kind == 1:
        return torch.from_numpy(generator.standard_normal((256, 256), dtype=np.float32))
    if kind == 2:
        return torch.tensor(n)
    return torch.from_numpy(generator.standard_normal((n // KINDS % 7, 64), dtype=np.float32)).to(
        torch.float16
    )


def name(n: int) -> str:
    """Tensor name of capture `n`."""
    return f"kind{n % KINDS}"
