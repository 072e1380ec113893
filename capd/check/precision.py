"""The precision of a captured product, from the dtypes of its operands and of its result.

Under autocast the captured input and weight are those before the cast, and a gradient may be cast afterwards. So the
coarsest dtype of a product is taken as the one in which it was multiplied.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["TF32", "Precision", "precision_of"]

# Sums are kept in float32 or better by every library.
_ACCUMULATE = 2.0**-24
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


class Precision(NamedTuple):
    """The precision of a product.

    Attributes:
        name: The dtype, or "tf32".
        eps: The unit roundoff: the largest relative error of rounding once, 2⁻⁸ for bfloat16.
        step: The absolute error of a number around zero.
        cast: The dtype to which the operands are rounded first.
    """

    name: str
    eps: float
    step: float
    cast: torch.dtype

    @property
    def computed_in(self) -> torch.dtype:
        """The dtype in which the check multiplies: much finer than `eps`."""
        return torch.float32 if self.eps > 2.0**-20 else torch.float64

    def error(self, terms: int, parts: int) -> float:
        """Return the relative error that a sound product may have, which limits are multiples of.

        The errors of a sum of n products grow as √n if their signs are random (Higham and Mary, "A New Approach to
        Probabilistic Rounding Error Analysis", 2019).

        Args:
            terms: The products of each sum.
            parts: The ranks whose rounded parts were added up.
        """
        grown = min(self.eps, _ACCUMULATE) * math.sqrt(max(1, terms))
        return self.eps * math.sqrt(parts) + grown

    def operand(self, values: Tensor) -> Tensor:
        """Return an operand as it was multiplied, in the dtype of the check."""
        return values.to(self.cast).to(self.computed_in)


TF32 = Precision("tf32", 2.0**-11, 2.0**-126, torch.float32)
"""The precision of float32 products on GPUs that are allowed to round operands to TF32."""


def precision_of(dtypes: list[str]) -> Precision | None:
    """Return the precision of a product whose operands and result have these dtypes.

    None if one is of no high precision, or if bfloat16 and float16 are mixed, so that the cast is not known.
    """
    if not all(name in _DTYPES for name in dtypes) or {"bfloat16", "float16"} <= {*dtypes}:
        return None
    name = max(dtypes, key=lambda each: torch.finfo(_DTYPES[each]).eps)
    known = torch.finfo(_DTYPES[name])
    # Only float16 has subnormal numbers everywhere. Kernels may flush those of other dtypes, as VDPBF16PS does.
    step = known.tiny * (known.eps if name == "float16" else 1)
    return Precision(name, known.eps / 2, step, _DTYPES[name])
