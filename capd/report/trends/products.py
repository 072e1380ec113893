"""The products of captured inputs and weights, measured for metrics of products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Union

from capd.ahead import AHEAD_NBYTES, ahead, worker_threads
from capd.analyze.format_choice import FormatChoice
from capd.analyze.trends.sums import Problems, TrendSums
from capd.io.items import UNREADABLE, Skipped, skipped
from capd.io.sample import evenly
from capd.report.products.linear_calls import Forward, LinearCalls
from capd.report.products.product_errors import matrix_of

__all__ = ["MOST_FORWARDS", "ProductCounts", "measure_forwards"]

MOST_FORWARDS = 64
"""The most products that are measured, evenly over all."""
# The memory that a product takes, by the bytes of its operands.
_WORK = 10
Measured = Union[tuple[Mapping[str, TrendSums], Problems], Skipped]


@dataclass(slots=True)
class ProductCounts:
    """The products: those whose operands were both captured, those measured, and those that cannot be measured.

    The last are of operands that are too large, slices of weights, or not of high precision.
    """

    found: int = 0
    measured: int = 0
    left_out: int = 0


def measure_forwards(
    calls: LinearCalls, choices: Sequence[FormatChoice], counts: ProductCounts, threads: int
) -> Iterator[tuple[Forward, Measured]]:
    """Yield some forwards, evenly chosen, with the sums of their product by label, or the reason of a failure."""
    forwards = list(calls.forwards())
    usable = [one for one in forwards if one.is_usable]
    counts.found, counts.left_out = len(forwards), len(forwards) - len(usable)
    chosen = evenly(usable, MOST_FORWARDS)
    with worker_threads(threads, "products") as pool:

        def begin(forward: Forward) -> Future[Measured]:
            return pool.submit(_measured, forward, choices)

        for forward, future in ahead(chosen, begin, lambda one: _WORK * one.nbytes, AHEAD_NBYTES):
            found = future.result()
            counts.measured += not isinstance(found, Skipped)
            yield forward, found


def _measured(forward: Forward, choices: Sequence[FormatChoice]) -> Measured:
    from capd.analyze.trends.accumulation import accumulations

    if forward.x.read is None or forward.weight.read is None:
        return {}, ["an operand is not of high precision"]
    name = forward.x.name
    try:
        x = matrix_of(forward.x.read(), forward.x)
        name = forward.weight.name
        weight = matrix_of(forward.weight.read(), forward.weight)
    except UNREADABLE as error:
        return skipped(name, error, damaged=True)
    try:
        return accumulations(x, weight, choices)
    except (MemoryError, RuntimeError) as error:
        return skipped(f"product of {forward.x.name}", error)
