"""A guess of the error that rounding leaves in each tensor, from the sizes of the products that were computed so far.

Each product of K terms that is added up over n ranks adds eps² (1 + log2 n) + u² K/6 to the square of the relative
error. eps is the unit roundoff of its tensors. 1 is the rounding of the result. A sum over n ranks in a tree rounds
log2 n times. Partial sums of k random terms have the size √k, and roundings within ±u of them the variance k u²/3. All
K of them have K² u²/6, and the result has the size √K. That such roundings are independent is the model of N. J. Higham
and T. Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41, 2019, section 2. u is the
unit roundoff in which the job adds up: at most float32's. Errors of consecutive products are taken to be independent,
and to be passed on as they are. Neither is true in general, which is why this is a guess.
"""

from __future__ import annotations

import math

from capd.layouts.whole_run import TensorName, WholeRun

__all__ = ["Roundings", "roundoff"]

# Half the distance of neighbouring numbers at 1: 2 to the power of minus the bits of the significand.
_ROUNDOFF = {
    "float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}  # fmt: skip
_OF_PARAMETERS = ("grad_weight", "grad_bias", "main_grad")


def roundoff(dtype: str) -> float:
    """Return the unit roundoff of a dtype; that of float32 for one whose numbers are exact."""
    return _ROUNDOFF.get(dtype, 2.0**-24)


class Roundings:
    """The products of a run until each tensor, as their tensors are asked for in order of execution."""

    def __init__(self, run: WholeRun, ranks: int) -> None:
        """Count nothing yet.

        Args:
            run: The run that has the shapes.
            ranks: The most ranks over which a product is added up.
        """
        self._run, self._sum_over_ranks = run, math.log2(max(ranks, 1))
        # The square of the error after each product, before each iteration, and after the last product.
        self._until: dict[tuple[int, str, str], float] = {}
        self._before: dict[int, float] = {}
        self._square = 0.0

    def estimate(self, name: TensorName, iteration: int, eps: float) -> float:
        """Return the guessed relative error of a tensor whose unit roundoff is `eps`.

        Ask in order of execution: the first tensor of a product adds it to all that comes after it.

        Raises:
            CapdError: As `LogicalSeries.shape`.
        """
        product = (iteration, name.module, name.operation)
        adds_up = min(eps, roundoff("float32")) ** 2 / 6
        before = self._before.setdefault(iteration, self._square)
        if product not in self._until:
            self._square += eps**2 * (1 + self._sum_over_ranks) + adds_up * self._terms_of(name)
            self._until[product] = self._square
        if name.is_parameter:
            # Only earlier steps have changed it.
            return math.sqrt(before)
        square = self._until[product]
        if name.tensor in _OF_PARAMETERS:
            # A sum over the tokens; the gradient of a whole step also over its micro-batches.
            batches = self._run.micro_batches if name.tensor == "main_grad" else 1
            square += adds_up * self._tokens_of(name) * batches
        return math.sqrt(square)

    def _terms_of(self, name: TensorName) -> int:
        """Return the number of terms that a product adds up for one element, 1 if its tensors do not say it."""
        if (key := self._shape(name, "forward", "key")) is not None and len(key) > 1:
            # Of queries with keys, then of probabilities with values: the longest of the other axes.
            return key[-1] + max(key[:-1])
        if (weight := self._shape(name, "forward", "weight")) is not None:
            return weight[-1] if name.operation == "forward" else weight[0]
        tensor = "input" if name.operation == "forward" else "grad_output"
        shape = self._shape(name, name.operation, tensor)
        return shape[-1] if shape else 1

    def _tokens_of(self, name: TensorName) -> int:
        shape = self._shape(name, "backward", "grad_output") or self._shape(name, "forward", "input")
        return math.prod(shape[:-1]) if shape else 1

    def _shape(self, name: TensorName, operation: str, tensor: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor of the product's module; None if it was not captured."""
        own = name._replace(operation=operation, tensor=tensor)
        found = self._run.occasions(own)
        return self._run.shape(own, found[0]) if found else None
