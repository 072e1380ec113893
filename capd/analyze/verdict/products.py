"""The error of the three products of a linear layer: recomputed from quantised operands, against the captured operands.

    Y = X Wᵀ        dX = dY W        dW = dYᵀ X

Each operand is quantised as a kernel needs it: in blocks along the axis that the product sums over. So W is quantised
along its inputs for Y and along its outputs for dX. Products and their sums are in float32, without a bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from capd.analyze.error_sums import Errors
from capd.analyze.format_choice import FormatChoice
from capd_client.formats import FormatError
from capd_client.formats.encoding import quantised

__all__ = ["MOST_ROWS", "PRODUCTS", "Operands", "product_errors"]

PRODUCTS = ("Y", "dX", "dW")
MOST_ROWS = 64
"""The most rows of a product that are computed, evenly chosen. Operands are always quantised whole."""


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of one call of a linear layer, of any dtype of high precision.

    Attributes:
        x: [tokens, in_features].
        weight: [out_features, in_features].
        dy: [tokens, out_features].
        is_partial: Whether these are some of the call's tokens, so that dW would be another sum.
    """

    x: torch.Tensor
    weight: torch.Tensor
    dy: torch.Tensor
    is_partial: bool = False

    @property
    def fit(self) -> bool:
        """Whether the shapes are those of one call with at least one value."""
        if not self.x.ndim == self.weight.ndim == self.dy.ndim == 2 or not self.x.numel() * self.dy.numel():
            return False
        return (*self.dy.shape, self.x.shape[1]) == (self.x.shape[0], *self.weight.shape)

    def pairs(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the operands a [rows, n] and b [n, columns] of each product a b."""
        of_tokens = {"Y": (self.x, self.weight.t()), "dX": (self.dy, self.weight)}
        return of_tokens if self.is_partial else {**of_tokens, "dW": (self.dy.t(), self.x)}


def product_errors(operands: Operands, choices: Sequence[FormatChoice]) -> Mapping[str, Mapping[str, Errors]]:
    """Return the errors of the three products of one call, by the format's label and the product's name.

    x of the errors is the product of the captured operands, y that of the quantised ones. A format that does not take
    the operands, or whose axis the user chose, is left out.
    """
    usable = [choice for choice in choices if "axis" not in choice.options]
    found: dict[str, dict[str, Errors]] = {choice.label: {} for choice in usable}
    for name, (a, b) in operands.pairs().items():
        a, b = a.to(torch.float32), b.to(torch.float32)
        rows = _rows(a.shape[0])
        exact = a[rows] @ b
        for choice in usable:
            try:
                left, right = _quantised(a, choice, -1), _quantised(b, choice, -2)
            except FormatError:
                continue
            found[choice.label][name] = _errors(exact, left[rows] @ right)
    return {label: errors for label, errors in found.items() if errors}


def _rows(count: int) -> torch.Tensor:
    chosen = min(count, MOST_ROWS)
    return torch.arange(chosen) * count // max(1, chosen)


def _quantised(values: torch.Tensor, choice: FormatChoice, axis: int) -> torch.Tensor:
    # Every call draws the same random bits for stochastic rounding.
    return quantised(values, choice.along(axis).spec, torch.Generator().manual_seed(0))


def _errors(exact: torch.Tensor, found: torch.Tensor) -> Errors:
    x, y = (values.numpy().astype(np.float64) for values in (exact, found))
    is_finite = np.isfinite(x)
    usable = is_finite & np.isfinite(y)
    errors = Errors(1, x.size)
    errors.nan, errors.inf = int(np.isnan(x).sum()), int(np.isinf(x).sum())
    errors.lost = int((is_finite & ~usable).sum())
    errors.add_values(np.where(usable, x, 0.0), np.where(usable, y, 0.0))
    return errors
