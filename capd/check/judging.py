"""Judges a captured product: its distance from the product of its operands, in units of the rounding of its dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from capd.check.precision import TF32, Precision
from capd.check.residual import Product, RowSums, row_sums_of

__all__ = ["LEAST_ROWS", "JudgedLines", "ProductJudgement", "ProductLimits", "judged", "judged_sums"]

# Estimates are off by 12 % at most of their norm or so; from this share of a limit on, the product is computed in full.
_SURE = 0.6
LEAST_ROWS = 2
"""The rows that tell an error from a bias. The difference of one row looks like a bias, whatever it is."""
_MOST_LINES = 8


class ProductLimits(NamedTuple):
    """The largest sound errors, in units of the rounding error that a product may have (`Precision.error`).

    Attributes:
        tensor: Of the whole: ‖c - a b‖ / ‖a b‖.
        row: Of each row and each column.
    """

    tensor: float = 2.0
    row: float = 6.0


class JudgedLines(NamedTuple):
    """The rows or columns beyond the limit: how many of how many, the first eight, and the largest error."""

    beyond: int
    of: int
    first: tuple[int, ...]
    worst: float


@dataclass(frozen=True, slots=True)
class ProductJudgement:
    """What was found of one product.

    Attributes:
        error: The error of the whole, in units of the rounding error.
        rows, columns: Those beyond the limit.
        precision: The name of the precision in which it was judged: the dtype, or "tf32".
        alpha: The factor that fits best, c ≈ α a b; None if there is none.
        rest: The error that is left after the factor.
        is_beyond: Whether the error is beyond a limit.
        has_bias: Whether a bias that was not captured was fitted.
    """

    error: float
    rows: JudgedLines
    columns: JudgedLines
    precision: str
    alpha: float | None
    rest: float | None
    is_beyond: bool
    has_bias: bool = False


def judged(
    product: Product,
    precision: Precision,
    limits: ProductLimits,
    *,
    parts: int = 1,
    may_have_bias: bool = False,
) -> ProductJudgement:
    """Judge a product.

    Args:
        product: The product and its operands.
        precision: Its precision.
        limits: The limits.
        parts: The ranks whose rounded products were added up.
        may_have_bias: Whether a bias was perhaps added that was not captured. It is then fitted if this helps: the mean
            row of the difference.
    """
    found = _judged(product, precision, limits, parts)
    if found.is_beyond and may_have_bias and product.c.shape[0] >= LEAST_ROWS:
        offset = product.fitted_offset()
        fitted = _judged(replace(product, offset=offset), precision, limits, parts)
        found = replace(fitted, has_bias=True) if _rank(fitted) < _rank(found) else found
    return found


def _rank(found: ProductJudgement) -> tuple[bool, float]:
    return found.is_beyond, found.error


def _judged(product: Product, precision: Precision, limits: ProductLimits, parts: int) -> ProductJudgement:
    sums = row_sums_of(product, in_full=False), row_sums_of(product.turned, in_full=False)
    terms = product.a.shape[1]
    cautious = ProductLimits(_SURE * limits.tensor, _SURE * limits.row)
    found = judged_sums(*sums, terms, precision, cautious, parts)
    if found.is_beyond:
        sums = row_sums_of(product, in_full=True), row_sums_of(product.turned, in_full=True)
    found = judged_sums(*sums, terms, precision, limits, parts)
    if found.is_beyond and precision.name == "float32":
        coarse = judged_sums(*sums, terms, TF32, limits, parts)
        return found if coarse.is_beyond else coarse
    return found


def judged_sums(
    rows: RowSums, columns: RowSums, terms: int, precision: Precision, limits: ProductLimits, parts: int
) -> ProductJudgement:
    """Judge a product by the sums of its rows and columns. `terms`: the products of each of its sums."""
    unit = precision.error(terms, parts)
    whole = _errors(rows.d2.sum(), rows, unit, precision, len(columns.d2), total=True)
    of_rows = _lines(_errors(rows.d2, rows, unit, precision, len(columns.d2)), rows.odd, limits.row)
    of_columns = _lines(_errors(columns.d2, columns, unit, precision, len(rows.d2)), columns.odd, limits.row)
    error = float(whole) if not bool(rows.odd.any()) else math.inf
    cy, yy, cc = rows.fit
    alpha = cy / yy if yy > 0 and math.isfinite(cy) else None
    rest = None
    if alpha:
        left = torch.tensor(max(0.0, cc - cy * alpha), dtype=torch.float64)
        scaled = rows._replace(y2=rows.y2 * alpha * alpha, s2=rows.s2 * alpha * alpha)
        rest = float(_errors(left, scaled, unit, precision, len(columns.d2), total=True))
    beyond = error > limits.tensor or of_rows.beyond > 0 or of_columns.beyond > 0
    return ProductJudgement(error, of_rows, of_columns, precision.name, alpha, rest, beyond)


def _errors(
    d2: Tensor, sums: RowSums, unit: float, precision: Precision, length: int, *, total: bool = False
) -> Tensor:
    """Return √d2 in units of the error that a sound product may have.

    The scale of a row is its norm. Where its terms cancel, it is that of the terms, whose rounding is left.
    """
    scale2 = torch.maximum(sums.y2, sums.s2)
    count = length * (len(scale2) if total else 1)
    scale = (scale2.sum() if total else scale2).sqrt() * unit + precision.step * math.sqrt(count)
    return d2.sqrt() / scale


def _lines(errors: Tensor, odd: Tensor, limit: float) -> JudgedLines:
    if not errors.numel():
        return JudgedLines(0, 0, (), 0.0)
    errors = errors.masked_fill(odd, math.inf)
    bad = (errors > limit).nonzero().flatten()
    return JudgedLines(len(bad), len(errors), tuple(bad[:_MOST_LINES].tolist()), float(errors.max()))
