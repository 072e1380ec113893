"""The product of captured operands, to which replayed products are compared.

It is kept in float32, times a power of two, so that squares of small gradients do not underflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MOST_DOUBLE", "After", "ExactProduct", "exact_product", "row_sums"]

After = Callable[[slice, Tensor], Tensor]
"""A linear function of a block of rows of a product: the block, and its values, which it may change in place."""

MOST_DOUBLE = 1 << 31
"""The most multiplications of a product that is computed in float64. A larger one is computed in float32."""
# A block has about so many values: 4 MiB of float32.
_BLOCK_VALUES = 1 << 20
# Beyond these powers of two, products in float32 could underflow or overflow before they are scaled.
_MOST_EXPONENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class ExactProduct:
    """G = A B, scaled.

    Attributes:
        values: [rows, columns] float32: G * 2**-(a_exponent + b_exponent), and 0 where G is not finite.
        a_exponent, b_exponent: The exponents of the largest magnitudes of A and B.
        signal: [rows] float64: Σ of the squares of `values`.
        nonfinite: [rows, columns] bool: where G is NaN or Inf. None if it is nowhere.
        dtype: The dtype of the product, float64 or float32.
    """

    values: Tensor
    a_exponent: int
    b_exponent: int
    signal: Tensor
    nonfinite: Tensor | None
    dtype: str

    @property
    def exponent(self) -> int:
        """The exponent by which a sum of squares of scaled values is too small."""
        return 2 * (self.a_exponent + self.b_exponent)

    def blocks(self, rows: slice | None = None, *, many: int = 1) -> Iterator[slice]:
        """Yield ranges of so many blocks of rows; of the whole product, or of a range that starts with a block."""
        first, last, _ = (rows or slice(None)).indices(self.values.shape[0])
        for block in _blocks(last - first, self.values.shape[1], many):
            yield slice(first + block.start, first + block.stop)

    def difference(self, rows: slice, a: Tensor, b: Tensor, after: After | None = None) -> Tensor:
        """Return a b - G of a block of rows, scaled as G, and 0 where G is not finite.

        Args:
            rows: The block.
            a: [rows of the block, n] float32.
            b: [n, columns] float32.
            after: What is done to the product before it is compared.
        """
        power = self.a_exponent + self.b_exponent
        is_far = abs(power) > _MOST_EXPONENT
        if is_far:
            a, b = _scaled(a, self.a_exponent), _scaled(b, self.b_exponent)
        factor = 1.0 if is_far else math.ldexp(1.0, -power)
        if after is None:
            d = torch.addmm(self.values[rows], a, b, beta=-1, alpha=factor)
        else:
            d = after(rows, a @ b).mul_(factor).sub_(self.values[rows])
        if self.nonfinite is not None:
            d.masked_fill_(self.nonfinite[rows], 0.0)
        return d


def exact_product(a: Tensor, b: Tensor) -> ExactProduct:
    """Compute the product of captured operands a [rows, n] and b [n, columns], of any floating dtype.

    It is computed in float64 if it has at most `MOST_DOUBLE` multiplications, and in float32 otherwise.
    """
    is_double = a.shape[0] * a.shape[1] * b.shape[1] <= MOST_DOUBLE
    dtype = torch.float64 if is_double else torch.float32
    a_exponent, b_exponent = _exponent(a), _exponent(b)
    right = _scaled(b.to(dtype), b_exponent)
    values = torch.empty(a.shape[0], b.shape[1])
    signal = torch.empty(a.shape[0], dtype=torch.float64)
    nonfinite = None
    for rows in _blocks(*values.shape):
        values[rows] = _scaled(a[rows].to(dtype), a_exponent) @ right
        signal[rows] = row_sums(values[rows], values[rows])
        if not bool(signal[rows].isfinite().all()):
            bad = ~values[rows].isfinite()
            nonfinite = torch.zeros(values.shape, dtype=torch.bool) if nonfinite is None else nonfinite
            nonfinite[rows] = bad
            values[rows].masked_fill_(bad, 0.0)
            signal[rows] = row_sums(values[rows], values[rows])
    return ExactProduct(values, a_exponent, b_exponent, signal, nonfinite, str(dtype).removeprefix("torch."))


def row_sums(a: Tensor, b: Tensor) -> Tensor:
    """Return Σ a b of each row in float64: a, b [rows, columns] float32. A row with a NaN or Inf is not finite.

    The terms of a row are summed in float32, whose vectors of partial sums keep six digits.
    """
    if a is b:
        norms: Tensor = torch.linalg.vector_norm(a, dim=1)
        return norms.to(torch.float64).square_()
    return torch.mul(a, b).sum(1).to(torch.float64)


def _blocks(rows: int, columns: int, many: int = 1) -> Iterator[slice]:
    step = max(1, _BLOCK_VALUES // max(1, columns)) * many
    for first in range(0, rows, step):
        yield slice(first, min(rows, first + step))


def _scaled(values: Tensor, exponent: int) -> Tensor:
    """Return values * 2**-exponent, exact within the range of their dtype."""
    if not exponent:
        return values
    # One factor could be beyond the range of float32.
    half = exponent // 2
    return (values * math.ldexp(1.0, -half)).mul_(math.ldexp(1.0, half - exponent))


def _exponent(values: Tensor) -> int:
    """Return the exponent of the largest finite magnitude, 0 if there is none but 0."""
    if not values.numel():
        return 0
    largest = _largest(values)
    if not math.isfinite(largest):
        finite = values[values.isfinite()]
        largest = _largest(finite) if finite.numel() else 0.0
    return math.frexp(largest)[1]


def _largest(values: Tensor) -> float:
    low, high = torch.aminmax(values)
    return max(abs(float(low)), abs(float(high))) if not math.isnan(float(low)) else math.nan
