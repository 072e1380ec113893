"""The orthonormal Hadamard transform along an axis, by Sylvester's matrices."""

from __future__ import annotations

import math

import torch

from capd_client.formats.spec import FormatError

__all__ = ["hadamard", "seeded_signs"]


def hadamard(
    x: torch.Tensor, size: int, *, axis: int = -1, signs: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x with each run of `size` values along an axis multiplied by diag(s) H / √size.

    H is Sylvester's matrix: H_1 = [1], H_2n = [[H_n, H_n], [H_n, -H_n]]. It is symmetric, and its own inverse after the
    division. Source: "Training LLMs with MXFP4", arXiv 2502.20586 (the random Hadamard transform).

    Args:
        x: float32 of any shape.
        size: A power of two.
        axis: The axis.
        signs: s, [size] of ±1; None for +1 alone.

    Returns:
        A tensor of x's shape, float32.

    Raises:
        FormatError: If x lacks the axis, its length is no multiple of the size, or the size is no power of two.
    """
    if size < 1 or size & (size - 1):
        raise FormatError(f"a Hadamard transform of size {size} does not exist here; sizes are powers of two")
    if not -x.ndim <= axis < x.ndim:
        raise FormatError(f"a tensor of shape {tuple(x.shape)} has no axis {axis} for a Hadamard transform")
    if x.shape[axis] % size:
        raise FormatError(
            f"a Hadamard transform of size {size} needs a multiple of it along axis {axis}, and the shape is "
            f"{tuple(x.shape)}"
        )
    moved = x.movedim(axis, -1)
    runs = moved.reshape(*moved.shape[:-1], moved.shape[-1] // size, size)
    matrix = _matrix(size) if signs is None else signs.to(torch.float32)[:, None] * _matrix(size)
    return (runs @ matrix).reshape(moved.shape).movedim(-1, axis).contiguous()


def seeded_signs(size: int, seed: int = 0) -> torch.Tensor:
    """Return random signs, float32 [size], the same for the same seed."""
    bits = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.float32) * 2 - 1


def _matrix(size: int) -> torch.Tensor:
    found = torch.ones(1, 1)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found / math.sqrt(size)
