"""The difference of a captured product and the product of its captured operands, by rows and by columns.

Norms of rows are estimated first, from a product with few random columns: D V has the norms of D's rows on average
(Johnson and Lindenstrauss, 1984; Freivalds, 1977, checks products so). It reads each tensor once or twice and has no
cost of a product. A product that may be beyond a limit is computed in full, so estimates alone report nothing.

Squares are taken in float64. So those of 1e-30 and 1e30 neither underflow nor overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Product", "RowSums", "fitted_sums", "row_sums_of", "squares_of", "without_nonfinite"]

# The random columns of an estimate: a norm is off by 1 / √(2 · 32) = 12 %.
_COLUMNS = 32
_BLOCK_VALUES = 1 << 20
_SEED = 20260101
# Sums of rounded terms may overflow a little earlier than the exact sum.
_NEAR = 0.9


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A captured product and its operands: c = a b, in any floating dtype, as they lie in memory.

    Attributes:
        a: [rows, n].
        b: [n, columns].
        c: [rows, columns].
        offset: [columns] What is added to each row, in the dtype of the check; None if nothing is.
        dtype: The dtype of the check.
        cast: The dtype to which the operands were rounded before the product.
    """

    a: Tensor
    b: Tensor
    c: Tensor
    dtype: torch.dtype
    cast: torch.dtype
    offset: Tensor | None = None
    is_turned: bool = False

    @property
    def turned(self) -> Product:
        """The transposed product: its rows are the columns of this one, and have one offset each."""
        return Product(
            self.b.t(), self.a.t(), self.c.t(), self.dtype, self.cast, self.offset, not self.is_turned
        )

    def operand(self, values: Tensor) -> Tensor:
        """Return an operand as it was multiplied."""
        return values.to(self.cast).to(self.dtype)

    def fitted_offset(self) -> Tensor:
        """Return the mean row of c - a b, [columns]: what fits best as a bias that was not captured."""
        rows = self.c.shape[0]
        total = torch.zeros(self.c.shape[1], dtype=torch.float64)
        of_a = torch.zeros(self.a.shape[1], dtype=torch.float64)
        for some in _blocks(rows, max(self.c.shape[1], self.a.shape[1])):
            total += self.c[some].to(torch.float64).sum(0)
            of_a += self.operand(self.a[some]).to(torch.float64).sum(0)
        of_product = torch.zeros_like(total)
        for some in _blocks(self.b.shape[0], self.b.shape[1]):
            of_product += of_a[some] @ self.operand(self.b[some]).to(torch.float64)
        return ((total - of_product) / rows).to(self.dtype)


class RowSums(NamedTuple):
    """Sums of each row, float64 [rows].

    Attributes:
        d2: Σ (c - a b)².
        y2: Σ (a b)², the offset included.
        s2: Σ of the squares of all terms of all sums, the offset's included.
        fit: Σ c y, Σ y y and Σ c c, without the mean row if there is an offset.
        odd: Whether a value is NaN or Inf in one of c and a b alone. An Inf that is an overflow of a b is none.
    """

    d2: Tensor
    y2: Tensor
    s2: Tensor
    fit: tuple[float, float, float]
    odd: Tensor


def row_sums_of(product: Product, *, in_full: bool) -> RowSums:
    """Return the sums of each row; estimates of them unless `in_full`, if that costs less."""
    rows, columns = product.c.shape
    right = None if in_full or columns <= 4 * _COLUMNS else _random(columns, product)
    b = product.operand(product.b)
    squares = squares_of(b)
    if right is not None:
        b = b @ right
    offset = product.offset
    along = offset if offset is None or not product.is_turned else None
    centre = None if along is None else _mean(product)
    if right is not None and along is not None and centre is not None:
        along, centre = along @ right, centre @ right
    d2, y2, s2 = (torch.zeros(rows, dtype=torch.float64) for _ in range(3))
    odd = torch.zeros(rows, dtype=torch.bool)
    yy = cc = 0.0
    largest = min(torch.finfo(product.c.dtype).max, torch.finfo(product.cast).max)
    for some in _blocks(rows, max(columns, product.a.shape[1])):
        a = product.operand(product.a[some])
        y, c = a @ b, product.c[some].to(product.dtype)
        c = c if right is None else c @ right
        if offset is not None:
            if along is not None:
                y += along
            else:
                y += offset[some, None] * (1 if right is None else right.sum(0))
        s2[some] = a.to(torch.float64).square_() @ squares
        y, c, odd[some] = without_nonfinite(y, c, largest)
        d2[some], y2[some] = squares_of(c - y), squares_of(y)
        if centre is not None:
            y, c = y - centre, c - centre
        yy += float((y2[some] if centre is None else squares_of(y)).sum())
        cc += float(squares_of(c).sum())
    if offset is not None:
        squared = offset.to(torch.float64).square()
        s2 += squared * columns if product.is_turned else float(squared.sum())
    return RowSums(d2, y2, s2.nan_to_num(0.0, 0.0, 0.0), fitted_sums(float(d2.sum()), yy, cc), odd)


def fitted_sums(dd: float, yy: float, cc: float) -> tuple[float, float, float]:
    """Return Σ c y, Σ y y and Σ c c, from Σ (c - y)² and the last two: 2 c y = y² + c² - (c - y)²."""
    return (yy + cc - dd) / 2, yy, cc


def without_nonfinite(y: Tensor, c: Tensor, largest: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return both with 0 where one of them is not finite, and whether one of them alone is not in a row.

    Args:
        y: The product that was computed again, [rows, columns].
        c: The captured product.
        largest: The largest number of its dtype. Where y is near it or above, an Inf of the same sign is its rounding.
    """
    bad_y, bad_c = ~y.isfinite(), ~c.isfinite()
    if not (bool(bad_y.any()) or bool(bad_c.any())):
        return y, c, torch.zeros(y.shape[0], dtype=torch.bool)
    overflown = c.isinf() & (y.abs() >= _NEAR * largest) & (y.sign() == c.sign())
    odd = ((bad_y != bad_c) & ~overflown).any(1)
    bad = bad_y | bad_c
    return y.masked_fill(bad, 0.0), c.masked_fill(bad, 0.0), odd


def _mean(product: Product) -> Tensor:
    total = torch.zeros(product.c.shape[1], dtype=torch.float64)
    for some in _blocks(*product.c.shape):
        total += product.c[some].to(torch.float64).nan_to_num(0.0, 0.0, 0.0).sum(0)
    return (total / product.c.shape[0]).to(product.dtype)


def _random(columns: int, product: Product) -> Tensor:
    """Return random signs [columns, 32], scaled so that norms stay the same on average."""
    generator = torch.Generator().manual_seed(_SEED)
    signs = torch.randint(0, 2, (columns, _COLUMNS), generator=generator, dtype=torch.int8)
    return (2 * signs - 1).to(product.dtype) / math.sqrt(_COLUMNS)


def squares_of(values: Tensor) -> Tensor:
    """Return the sum of the squares of each row, float64 [rows]."""
    # The rows are copied to float64.
    norms = [
        torch.linalg.vector_norm(values[some], dim=1, dtype=torch.float64) for some in _blocks(*values.shape)
    ]
    return torch.cat(norms).square_() if norms else torch.zeros(0, dtype=torch.float64)


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _BLOCK_VALUES // max(1, columns))
    for first in range(0, rows, step):
        yield slice(first, min(rows, first + step))
