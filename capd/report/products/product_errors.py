"""Measures the error of the products of linear layers in each format, on some of the captured calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

import numpy as np
from numpy.typing import NDArray

from capd.ahead import AHEAD_NBYTES, ahead, worker_threads
from capd.analyze.error_sums import Errors
from capd.analyze.format_choice import FormatChoice
from capd.analyze.verdict.levels import Levels, levels_of
from capd.io.items import UNREADABLE, Skipped, skipped
from capd.io.sample import evenly
from capd.report.products.linear_calls import Call, LinearCalls, Operand
from capd.store.read.series import tensor_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "MOST_CALLS", "ProductError", "ProductErrors", "Result", "matrix_of", "measure_call", "measure_products",
    "measured_here",
]  # fmt: skip

MOST_CALLS = 32
"""The most calls that are measured, evenly over the modules."""
# Of the operands of all measured calls: about 15 s of CPU for the five default formats.
_MOST_NBYTES = 128 << 20
# The memory that a call takes, by the bytes of its operands.
_WORK = 10

OfCall = Mapping[str, Mapping[str, Errors]]
"""The errors of one call by the format's label and the product's name."""
Result = Union[OfCall, Skipped, None]


@dataclass(slots=True)
class ProductError:
    """The error of a format on one product: the sums over all calls, and the SQNR of each call."""

    errors: Errors = field(default_factory=Errors)
    each: list[float] = field(default_factory=list)

    def add(self, errors: Errors) -> None:
        """Add the errors of one call."""
        self.errors.add(errors)
        if errors.sqnr_db is not None:
            self.each.append(errors.sqnr_db)

    @property
    def levels(self) -> Levels | None:
        """The distribution of the SQNR over the calls."""
        return levels_of(self.each)


@dataclass(slots=True)
class ProductErrors:
    """The errors of products.

    Attributes:
        calls: The calls whose three operands were captured.
        measured: The measured calls.
        partial: The measured calls of which some tokens alone were captured. They have no dW.
        left_out: The calls that cannot be measured: an operand is not of high precision, unreadable, or too large, the
            shapes do not fit, or input and output gradient are of different tokens.
        skipped: The operands that could not be read.
    """

    calls: int = 0
    measured: int = 0
    partial: int = 0
    left_out: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    _errors: dict[str, dict[str, ProductError]] = field(default_factory=dict)

    def of(self, label: str) -> Mapping[str, ProductError]:
        """Return the error of a format by the product's name (`capd.analyze.verdict.products`)."""
        return self._errors.get(label, {})

    def add(self, call: Call, found: Result) -> None:
        """Add the result of a call: its errors, or an operand that could not be read, or None if shapes do not fit."""
        if isinstance(found, Skipped):
            self.skipped.append(found)
        if found is None or isinstance(found, Skipped):
            self.left_out += 1
            return
        self.measured += 1
        self.partial += call.is_partial
        for label, of_format in found.items():
            for name, errors in of_format.items():
                self._errors.setdefault(label, {}).setdefault(name, ProductError()).add(errors)


def measure_products(
    calls: LinearCalls, measured: Callable[[Sequence[Call]], Iterable[Result]]
) -> ProductErrors:
    """Measure the products of at most MOST_CALLS calls, evenly over the modules; of large ones fewer, at least one.

    `measured` returns the result of each call, in order.
    """
    modules = calls.by_module()
    usable = [own for each in modules if (own := [call for call in each if call.is_usable])]
    found = ProductErrors(calls=sum(map(len, modules)))
    found.left_out = found.calls - sum(map(len, usable))
    chosen = _chosen(usable)
    for call, result in zip(chosen, measured(chosen), strict=True):
        found.add(call, result)
    return found


def measured_here(
    choices: Sequence[FormatChoice], threads: int
) -> Callable[[Sequence[Call]], Iterable[Result]]:
    """Return what measures calls in threads of this process, within 128 MiB or one call."""

    def measured(calls: Sequence[Call]) -> Iterator[Result]:
        with worker_threads(threads, "products") as pool:

            def begin(call: Call) -> Future[Result]:
                return pool.submit(measure_call, call, choices)

            for _, future in ahead(calls, begin, lambda call: _WORK * call.nbytes, AHEAD_NBYTES):
                yield future.result()

    return measured


def _chosen(modules: Sequence[Sequence[Call]]) -> list[Call]:
    """Return the most calls whose operands fit the limit together, evenly over the modules, at least one."""
    for most in range(MOST_CALLS, 1, -1):
        some = _evenly_over(modules, most)
        if sum(call.nbytes for call in some) <= _MOST_NBYTES:
            return some
    return _evenly_over(modules, 1)


def _evenly_over(modules: Sequence[Sequence[Call]], most: int) -> list[Call]:
    some = evenly(modules, most)
    each, more = divmod(most, max(1, len(some)))
    return [call for place, calls in enumerate(some) for call in evenly(calls, each + (place < more))]


def matrix_of(bits: NDArray[np.generic], operand: Operand) -> torch.Tensor:
    """Return an operand with all of its axes but the last one as rows; a weight as [out_features, in_features]."""
    values = tensor_of(bits, operand.dtype)
    if values.ndim != 2:
        values = values.reshape(-1, values.shape[-1] if values.ndim else 1)
    return values.t() if operand.is_transposed else values


def measure_call(call: Call, choices: Sequence[FormatChoice]) -> Result:
    """Read the operands of a call and measure its products."""
    # The import needs torch, which a report without formats does not load.
    from capd.analyze.verdict.products import Operands, product_errors

    matrices = []
    for one in call:
        if one.read is None:
            return None
        try:
            matrices.append(matrix_of(one.read(), one))
        except UNREADABLE as error:
            return skipped(one.name, error, damaged=True)
    x, weight, dy = matrices
    operands = Operands(x, weight, dy, is_partial=call.is_partial)
    try:
        return product_errors(operands, choices) if operands.fit else None
    except (MemoryError, RuntimeError) as error:
        return skipped(f"product of {call.x.name}", error)
