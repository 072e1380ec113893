"""The units of a check: the calls of a module whose weight has one gradient."""

from __future__ import annotations

from typing import NamedTuple

from capd.products.captured.calls import ProductCall, ProductCalls, sampled

__all__ = ["CheckUnit", "order_of", "units_of"]

_TENSORS = ("x", "g", "y", "dx", "dw", "q", "o")
_PLACE = ("attempt", "iteration", "micro_batch")


class CheckUnit(NamedTuple):
    """The calls of a module in one micro-batch.

    Attributes:
        calls: The calls.
        later: Those of the micro-batches that follow in the iteration, up to the next with a gradient of the weight.
            If one backward computed the gradients of several micro-batches, the first one has their sum.
    """

    calls: tuple[ProductCall, ...]
    later: tuple[ProductCall, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors of the calls. The operands of later ones are read if they are needed."""
        return sum(one.nbytes for call in self.calls for one in call.tensors.values())

    @property
    def has_gradient(self) -> bool:
        """Whether the gradient of the weight was captured."""
        return any("dw" in call.tensors for call in self.calls)


def units_of(calls: ProductCalls, share: float) -> list[CheckUnit]:
    """Return the calls by module and micro-batch, in order of iteration and micro-batch. Of a module, a share."""
    found: list[CheckUnit] = []
    for module in calls.by_module(_TENSORS):
        units: dict[tuple[object, ...], list[ProductCall]] = {}
        for call in module:
            units.setdefault(tuple(call.place[name] for name in _PLACE), []).append(call)
        ordered = sorted((CheckUnit(tuple(one)) for one in units.values()), key=_order)
        found += sampled(_with_later(ordered), share)
    return sorted(found, key=_order)


def _with_later(units: list[CheckUnit]) -> list[CheckUnit]:
    found: list[CheckUnit] = []
    later: tuple[ProductCall, ...] = ()
    for at in range(len(units) - 1, -1, -1):
        unit = units[at]
        if at + 1 < len(units) and order_of(unit.calls[0])[:2] != order_of(units[at + 1].calls[0])[:2]:
            later = ()
        if unit.has_gradient:
            found.append(unit._replace(later=later))
            later = ()
        else:
            found.append(unit)
            # A forward without a gradient takes no part in the sum.
            later = (*(call for call in unit.calls if "g" in call.tensors), *later)
    return found[::-1]


def order_of(call: ProductCall) -> tuple[int, ...]:
    """Return the attempt, iteration, micro-batch and layer of a call, -1 for what is not known."""
    return tuple(
        value if type(value) is int else -1 for value in (call.place[name] for name in (*_PLACE, "layer"))
    )


def _order(unit: CheckUnit) -> tuple[int, ...]:
    return order_of(unit.calls[0])
