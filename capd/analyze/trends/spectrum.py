"""The spectrum of a tensor as a matrix: stable rank, and the share of energy in the largest singular values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from capd.analyze.exact import ShortSum
from capd.analyze.trends.sums import Floats, Number, TrendSums, mean_of, share_of_all

if TYPE_CHECKING:
    import torch

__all__ = ["Spectrum", "largest_singular_values", "spectrum_of"]

# Up to this many rows or columns, all singular values follow from the Gram matrix.
_EXACT = 256
_OVERSAMPLED = 4
# Blocks of a Krylov space. With one block alone, the largest of many close values is missed by some percent.
_BLOCKS = 8
_PIECE = 1 << 20


@dataclass(slots=True)
class Spectrum(TrendSums):
    """The spectra of tensors as matrices [all axes but the last, the last].

    stable rank = ‖x‖_F² / ‖x‖₂². top-k energy = Σ_{i ≤ k} σ_i² / Σ σ_i². Both need whole tensors: those of shards do
    not give those of the whole. Several tensors give the mean of their stable ranks, and the share of their energies
    together.

    Source: Metis, arXiv 2509.00404 (a few singular values of weights, activations and gradients dominate);
    Rudelson and Vershynin, "Sampling from large matrices", JACM 2007, section 1 (stable rank).

    Attributes:
        records: The tensors.
        stable_ranks: Σ of the stable ranks.
        full_ranks: Σ of the smaller sides, the largest possible ranks.
        first, top, energy: Σ of σ_1², of the k largest σ², and of ‖x‖_F².
    """

    records: int = 0
    stable_ranks: ShortSum = field(default_factory=ShortSum)
    full_ranks: int = 0
    first: ShortSum = field(default_factory=ShortSum)
    top: ShortSum = field(default_factory=ShortSum)
    energy: ShortSum = field(default_factory=ShortSum)

    def numbers(self) -> dict[str, Number]:
        """Return the means over the tensors, and shares of energy in percent."""
        return {
            "tensors": self.records,
            "stable_rank": mean_of(self.stable_ranks, self.records),
            "full_rank": self.full_ranks / self.records if self.records else None,
            "first_percent": share_of_all(self.first.value, self.energy.value),
            "top_percent": share_of_all(self.top.value, self.energy.value),
        }


def spectrum_of(values: torch.Tensor, number: int) -> Spectrum | str:
    """Return the spectrum of one tensor by its `number` largest singular values, or why it has none."""
    import torch

    if values.ndim < 2 or not values.numel():
        return "it is no matrix: it has fewer than two dimensions, or no values"
    matrix = values.detach().to(torch.float32).reshape(-1, values.shape[-1])
    largest = float(matrix.abs().max())
    if not np.isfinite(largest):
        return "a matrix with NaN or Inf has no singular values"
    if not largest:
        return "it has only zeros"
    # The scaled values are in [-1, 1], so no square overflows.
    matrix = matrix / largest
    sigma = largest_singular_values(matrix, number)
    squares = sigma**2
    energy = _energy(matrix)
    found = Spectrum(1, full_ranks=min(matrix.shape))
    found.stable_ranks.add(max(1.0, energy / float(squares[0])))
    for total, value in (
        (found.first, float(squares[0])), (found.top, float(squares.sum())), (found.energy, energy),
    ):  # fmt: skip
        total.add(min(value, energy) * largest**2)
    return found


def largest_singular_values(matrix: torch.Tensor, number: int) -> Floats:
    """Return the largest singular values of a matrix, descending, float64 [at most number].

    A side of up to 256 gives all of them from the Gram matrix in float64. Otherwise they are those of a random
    projection with a fixed seed onto a block Krylov space, which are never above the true ones. Sources: Halko,
    Martinsson and Tropp, "Finding structure with randomness", SIAM Review 2011, section 4.5 (power iterations, each
    made orthonormal); Musco and Musco, "Randomized block Krylov methods", NeurIPS 2015, algorithm 2.

    Args:
        matrix: float32 [rows, columns], finite, with at least one value.
        number: The number of values.
    """
    import torch

    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
    side = wide.shape[0]
    if side <= _EXACT:
        gram = np.zeros((side, side))
        step = max(1, _PIECE // side)
        for start in range(0, wide.shape[1], step):
            part = wide[:, start : start + step].numpy().astype(np.float64)
            gram += part @ part.T
        squares = np.linalg.eigvalsh(gram)[::-1][:number]
        exact: Floats = np.sqrt(np.maximum(squares, 0.0)).astype(np.float64)
        return exact
    generator = torch.Generator().manual_seed(0)
    width = min(side, number + _OVERSAMPLED)
    bases = [torch.linalg.qr(wide @ torch.randn(wide.shape[1], width, generator=generator)).Q]
    for _ in range(min(_BLOCKS, side // width) - 1):
        other = torch.linalg.qr(wide.t() @ bases[-1]).Q
        bases.append(torch.linalg.qr(wide @ other).Q)
    base = torch.linalg.qr(torch.cat(bases, 1)).Q
    found: Floats = torch.linalg.svdvals((base.t() @ wide).to(torch.float64))[:number].numpy()
    return found


def _energy(matrix: torch.Tensor) -> float:
    flat = matrix.reshape(-1)
    parts = (flat[at : at + _PIECE].numpy().astype(np.float64) for at in range(0, flat.numel(), _PIECE))
    return float(sum(np.dot(part, part) for part in parts))
