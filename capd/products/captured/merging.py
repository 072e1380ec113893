"""Brings the tensors of one module together whose labels are nothing but their dtypes.

A job without `quant_type` has its gradients of weights in "fp32" and its inputs in "bf16" under autocast, and the ends
of the experts' rows in "int32". They belong to one product.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TypeVar, Union

from capd_client.protocol.dtypes import short_name_of

__all__ = ["At", "Layer", "Value", "is_dtype", "merged", "together"]

Value = Union[str, int, None]
Layer = tuple[Value, ...]
"""The quant type, and what else tells the tensors of one module from others."""
At = tuple[Value, ...]
T = TypeVar("T")
_OPERANDS = ("x", "q", "g")


def is_dtype(quant_type: Value, dtype: str) -> bool:
    """Return whether a label says nothing but the dtype."""
    return quant_type == short_name_of(dtype)


def together(layers: Iterable[Layer], labelled: Collection[Layer]) -> list[list[Layer]]:
    """Return the layers in groups: those that differ in their quant type alone, unless one of them is `labelled`."""
    groups: dict[Layer, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(layer if layer in labelled else (None, *layer[1:]), []).append(layer)
    return list(groups.values())


def merged(
    group: list[Layer], calls: Mapping[Layer, Mapping[At, Mapping[str, T]]]
) -> Iterator[tuple[Layer, Mapping[At, Mapping[str, T]]]]:
    """Yield each layer with the tensors of its calls, or one with all of them.

    Its quant type is that of the input. Layers that have the same tensor of the same call are different runs.
    """
    found: dict[At, dict[str, T]] = {}
    for layer in group:
        for at, tensors in calls[layer].items():
            known = found.setdefault(at, {})
            if not known.keys().isdisjoint(tensors):
                yield from ((one, calls[one]) for one in group)
                return
            known.update(tensors)
    yield min(group, key=lambda layer: _rank(calls[layer])), found


def _rank(calls: Mapping[At, Mapping[str, T]]) -> int:
    names = {name for tensors in calls.values() for name in tensors}
    return next((at for at, name in enumerate(_OPERANDS) if name in names), len(_OPERANDS))
