"""Hadamard transforms: each group of n values along an axis is multiplied by an orthogonal matrix with entries ±1/√n.

The matrix is diag(s) · H / √n, with Sylvester's H and signs s. Both operands of a product are transformed along the
contraction with the same signs, so that the transforms cancel: H · Hᵀ = n · I. Sources: Tseng et al., "Training LLMs
with MXFP4", arXiv 2502.20586 (random signs); NVIDIA, arXiv 2509.25149, and TransformerEngine's
`quantization_ref_nvfp4.py` (n = 16 with one fixed vector of signs).
"""

from __future__ import annotations

import math
from typing import Optional, Union

import torch

from capd_client.formats.spec import FormatError
from capd_client.formats.tables import cached

__all__ = ["MOST_SIZE", "TE_SIGNS", "Signs", "hadamard", "inverse_hadamard", "seeded_signs"]

MOST_SIZE = 128
"""The largest size of a transform."""
TE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""TransformerEngine's fixed signs, for size 16. Source: `get_wgrad_sign_vector` in `quantization_ref_nvfp4.py`."""

Signs = Union[None, str, torch.Tensor]
"""None for no signs, "te" for TE_SIGNS, or a tensor of ±1 with as many values as the size."""


def hadamard(
    x: torch.Tensor, size: int, *, axis: int = -1, signs: Signs = None, round_to: Optional[torch.dtype] = None
) -> torch.Tensor:
    """Transform each group of `size` values along an axis.

    Args:
        x: A floating-point tensor of any shape.
        size: The size of a group: a power of two, at most MOST_SIZE. It must divide the length of the axis.
        axis: The axis of the groups, usually the contraction of a product.
        signs: The signs of the values before the transform.
        round_to: The dtype to which results are rounded. None rounds to x's dtype. If it is x's dtype, the product
            itself is computed in it, as TransformerEngine's reference does; else in float32.

    Returns:
        A contiguous tensor of x's shape, in `round_to` or x's dtype.

    Raises:
        FormatError: The size or the signs cannot be used.
    """
    return _transformed(x, size, axis, signs, round_to, inverse=False)


def inverse_hadamard(
    x: torch.Tensor, size: int, *, axis: int = -1, signs: Signs = None, round_to: Optional[torch.dtype] = None
) -> torch.Tensor:
    """Undo `hadamard` of the same arguments."""
    return _transformed(x, size, axis, signs, round_to, inverse=True)


def seeded_signs(size: int, seed: int, device: Union[str, torch.device] = "cpu") -> torch.Tensor:
    """Return `size` signs ±1, float32, that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(2, (size,), generator=generator, dtype=torch.int64).mul_(2).sub_(1)
    return found.to(torch.float32).to(device)


@torch.no_grad()
def _transformed(
    x: torch.Tensor, size: int, axis: int, signs: Signs, round_to: Optional[torch.dtype], *, inverse: bool
) -> torch.Tensor:
    if type(size) is not int or not 1 <= size <= MOST_SIZE or size & (size - 1):
        raise FormatError(
            f"the size of a Hadamard transform cannot be {size!r}; allowed are 1, 2, 4 … {MOST_SIZE}"
        )
    if not x.is_floating_point() or x.ndim == 0 or not -x.ndim <= axis < x.ndim:
        raise FormatError(
            f"a Hadamard transform along axis {axis} takes no tensor of {x.dtype} and shape {tuple(x.shape)}"
        )
    length = x.shape[axis]
    if length % size:
        raise FormatError(
            f"a Hadamard transform of size {size} takes axes whose length it divides; axis {axis} has {length} values"
        )
    dtype = x.dtype if round_to in (None, x.dtype) and x.dtype != torch.float64 else torch.float32
    matrix = _matrix(size, _sign_values(signs, size), x.device)
    moved = x.movedim(axis, -1)
    groups = moved.reshape(-1, size).to(dtype)
    found = groups @ (matrix.t() if inverse else matrix).to(dtype)
    whole: torch.Tensor = found.reshape(moved.shape).movedim(-1, axis).contiguous().to(round_to or x.dtype)
    return whole


def _sign_values(signs: Signs, size: int) -> Optional[tuple[int, ...]]:
    if signs is None:
        return None
    if isinstance(signs, str):
        if signs != "te":
            raise FormatError(f"signs cannot be {signs!r}; allowed are None, 'te' and a tensor of ±1")
        if size != len(TE_SIGNS):
            raise FormatError(f"the signs 'te' are for size {len(TE_SIGNS)}, not {size}")
        return TE_SIGNS
    values = tuple(int(value) for value in signs.tolist())
    if len(values) != size or any(value not in (1, -1) for value in values):
        raise FormatError(f"signs must be {size} values of 1 or -1")
    return values


@cached
def _matrix(size: int, signs: Optional[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    """Return diag(signs) · H / √size, float32 [size, size]."""
    found = torch.ones((1, 1), dtype=torch.float32)
    while found.shape[0] < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    if signs is not None:
        found = torch.tensor(signs, dtype=torch.float32)[:, None] * found
    return found.mul_(1 / math.sqrt(size)).to(device)
