"""Measures one product of quantised operands against the exact product: its sums, its blame, the mean of draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from capd.analyze.exact import exact
from capd.replay.exact_product import After, ExactProduct, row_sums
from capd.replay.operand_rows import Rows
from capd.replay.sums import BlameSums, DrawSums, ProductSums, WorstRow

__all__ = ["OperandPair", "measure_product"]

# So many blocks are multiplied at once: each product lays out all of B again.
_MULTIPLIED_BLOCKS = 4


class OperandPair(NamedTuple):
    """The operands of one product in a recipe.

    Attributes:
        a: Returns some rows of A [rows, n], float32, quantised. Random rows are made in order, and once.
        b: [n, columns] float32, quantised.
        plain_a: Returns rows of A before it is quantised, and after its transform. None if it is a, or if nobody asks.
        plain_b: B before it is quantised, in the same way.
        after: What the recipe does to the product. None for nothing.
        is_exact: Whether the recipe does nothing to the product, so that it has no error.
    """

    a: Rows
    b: Tensor
    plain_a: Rows | None = None
    plain_b: Tensor | None = None
    after: After | None = None
    is_exact: bool = False


def measure_product(
    drawn: Callable[[int], OperandPair],
    product: ExactProduct,
    *,
    call: str = "",
    draws: int = 1,
    is_random: bool = False,
    blame: bool = False,
    row_of: Callable[[int], int] = int,
) -> ProductSums:
    """Return the sums of a product of which all draws are measured.

    Args:
        drawn: Returns the operands of a draw.
        product: The exact product.
        call: The name of the call in messages.
        draws: The draws, 1 for a product that is not random.
        is_random: Whether draws differ.
        blame: Whether to attribute the error to the operands. It takes up to two more products.
        row_of: Returns the number of a row in the whole product, where some rows were measured.
    """
    found = ProductSums(calls=1, is_random=is_random, references={product.dtype})
    found.blame = BlameSums() if blame else None
    mean = torch.zeros_like(product.values) if draws > 1 else None
    for draw in range(draws):
        pair = drawn(draw)
        one = _Measuring(found, product, call, row_of)
        if pair.is_exact:
            one.add_exact()
        else:
            one.add(pair, mean)
        del pair
    if mean is not None:
        noise = sum(float(row_sums(mean[rows], mean[rows]).sum()) for rows in product.blocks())
        found.draws = DrawSums(draws, found.signal, _units(noise / draws, product.exponent), found.noise)
    return found


class _Measuring:
    """Adds one draw of a product to its sums."""

    def __init__(
        self, found: ProductSums, product: ExactProduct, call: str, row_of: Callable[[int], int]
    ) -> None:
        self._found, self._product, self._call, self._row_of = found, product, call, row_of
        self._power = product.exponent
        found.values += product.values.numel()
        if product.nonfinite is not None:
            found.nonfinite += int(product.nonfinite.sum())

    def add_exact(self) -> None:
        """Add a product without an error."""
        self._found.signal += _units(float(self._product.signal.sum()), self._power)

    def add(self, pair: OperandPair, mean: Tensor | None) -> None:
        """Add the product of a pair, and its error to `mean`."""
        plain_b = (
            None if pair.plain_b is None or self._found.blame is None else pair.plain_b.to(torch.float32)
        )
        # The parts of an error take the memory of several products.
        many = 1 if self._found.blame is not None else _MULTIPLIED_BLOCKS
        totals = (0.0, 0.0, 0.0)
        for some in self._product.blocks(many=many):
            a = pair.a(some)
            errors = self._product.difference(some, a, pair.b, pair.after)
            for rows in self._product.blocks(some):
                d = errors[rows.start - some.start : rows.stop - some.start]
                more, lost = self._sums(rows, d)
                totals = (totals[0] + more[0], totals[1] + more[1], totals[2] + more[2])
                if mean is not None:
                    mean[rows] += d
                if self._found.blame is not None:
                    self._blame(self._found.blame, self._parts(pair, a, plain_b, rows, d), d, lost)
                    self._found.blame.noise += _units(more[1], self._power)
        self._found.signal += _units(totals[0], self._power)
        self._found.noise += _units(totals[1], self._power)
        self._found.cross += _units(totals[2], self._power)

    def _sums(self, rows: slice, d: Tensor) -> tuple[tuple[float, float, float], Tensor | None]:
        """Return Σ G², Σ d² and Σ G d of some rows, and which values are lost. Lost values of d become 0."""
        of_signal, lost = self._product.signal[rows], None
        of_noise, of_cross = row_sums(d, d), row_sums(self._product.values[rows], d)
        if not math.isfinite(float(of_noise.sum()) + float(of_cross.sum())):
            lost = ~d.isfinite()
            of_signal, of_noise, of_cross = self._without_lost(rows, d, lost)
        self._note_worst(rows.start, of_signal, of_noise)
        return (float(of_signal.sum()), float(of_noise.sum()), float(of_cross.sum())), lost

    def _without_lost(self, rows: slice, d: Tensor, lost: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Set lost values of d to 0, count them, and return the sums of the rows in float64."""
        d.masked_fill_(lost, 0.0)
        self._found.lost += int(lost.sum())
        values, error = (
            self._product.values[rows].masked_fill(lost, 0.0).to(torch.float64),
            d.to(torch.float64),
        )
        return (values * values).sum(1), (error * error).sum(1), (values * error).sum(1)

    def _note_worst(self, first: int, signal: Tensor, noise: Tensor) -> None:
        ratio = torch.where((signal > 0) & (noise > 0), noise / signal, 0.0)
        row = int(ratio.argmax())
        share = float(ratio[row])
        if share:
            # A row that became zero has 0 dB, whatever its sums are rounded to.
            level = round(-10 * math.log10(share), 6) + 0.0
            if self._found.worst is None or level < self._found.worst.sqnr_db:
                self._found.worst = WorstRow(self._call, self._row_of(first + row), level)

    def _parts(
        self, pair: OperandPair, a: Tensor, plain_b: Tensor | None, rows: slice, d: Tensor
    ) -> list[Tensor | None]:
        """Return the parts of the error d of some rows, in the order of `BLAMED`. `a` are those rows of A."""
        if pair.after is None and (pair.plain_a is None or plain_b is None):
            # Only one operand is quantised, and the whole error is its own.
            return [None if pair.plain_a is None else d, None if plain_b is None else d, None, None]
        plain_a = a if pair.plain_a is None else pair.plain_a(rows).to(torch.float32)
        right = pair.b if plain_b is None else plain_b
        # What comes after the product has an error of its own.
        base = None if pair.after is None else self._product.difference(rows, plain_a, right, pair.after)
        of_a = self._product.difference(rows, a, right, pair.after)
        of_b = self._product.difference(rows, plain_a, pair.b, pair.after)
        cross = (d - of_a).sub_(of_b)
        if base is not None:
            of_a, of_b, cross = of_a.sub_(base), of_b.sub_(base), cross.add_(base)
        return [of_a, of_b, cross, base]

    def _blame(self, sums: BlameSums, parts: list[Tensor | None], d: Tensor, lost: Tensor | None) -> None:
        """Add the parts of the error d of some rows."""
        for at, part in enumerate(parts):
            if part is None:
                continue
            if lost is not None and part is not d:
                part.masked_fill_(lost, 0.0)
            energy = float(row_sums(part, part).sum())
            # The same function for both sums, so that the share of a part that is d is 1.
            inner = energy if part is d else float(row_sums(part, d).sum())
            sums.energy[at] += _units(energy, self._power)
            sums.inner[at] += _units(inner, self._power)


def _units(value: float, exponent: int) -> int:
    """Return value * 2**exponent in the whole units of `capd.analyze.exact`."""
    return exact(math.ldexp(value, exponent))
