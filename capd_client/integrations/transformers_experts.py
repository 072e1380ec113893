"""Mixtures of experts in Hugging Face transformers 5: two parameters with a weight for each expert, and a router.

An experts module holds the up projections of all experts in one parameter of three dimensions, the down projections in
another. With `experts_implementation` "grouped_mm" (the default) each projection is one product over rows sorted by
expert: one record, whose `offsets` say where each expert's rows end. With "eager" each expert that got rows has a
product of its own: a record for each, whose metadata names the expert. "batched_mm" computes every row by itself, in
the order of the tokens' choices. Up to transformers 4.57 experts and router are nn.Linear, and need nothing of this.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Optional

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from capd_client.hooks.function_sites import FunctionSite
from capd_client.hooks.owners import current_module, current_tap
from capd_client.hooks.sites import Site
from capd_client.hooks.tap import Tap
from capd_client.integrations.callers import calls
from capd_client.protocol.kinds import GROUPED_LINEAR, LINEAR, Kind

__all__ = ["find_sites", "is_experts"]

_MOE = "transformers.integrations.moe"
_ROLE = "experts"
_Function = Callable[..., Any]

_traced: list[nn.Module] = []  # the experts whose forward is being compiled


class _Projections(FunctionSite):
    """A function that computes one projection of all experts, or of one.

    arguments: names that the function gives the operands and the weight.
    """

    def __init__(self, arguments: tuple[str, ...]) -> None:
        super().__init__(_ROLE, GROUPED_LINEAR, arguments, asks=False)
        self._places = tuple(range(len(arguments)))  # of these arguments

    def operands(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        given = zip(self._arguments, self._places, strict=True)
        return tuple(args[place] if place < len(args) else kwargs.get(name) for name, place in given)

    def _with(
        self, operands: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (
            operands[0],
            *args[1:],
        ), kwargs  # transformers gives the input first; offsets are no other ones

    def tap_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optional[Tap]:
        module = current_module()
        name = "" if module is None else self._parameter(module, self.operands(args, kwargs)[-1])
        return current_tap(f"{_ROLE}.{name}") if name else None

    def role_in_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        name = self._parameter(_traced[-1], self.operands(args, kwargs)[-1]) if _traced else ""
        return f"{_ROLE}.{name}"

    def _parameter(self, module: nn.Module, weight: Tensor) -> str:
        """The name of the module's parameter that `weight` is, or "" if it is none."""
        for name, parameter in module._parameters.items():
            if parameter is weight:
                return name
        return ""


class _Grouped(_Projections):
    def patches(self) -> list[tuple[Any, str]]:
        return [(sys.modules[_MOE], "_grouped_linear")]

    def wrap(self, function: _Function) -> _Function:
        names = list(inspect.signature(function).parameters)  # their order changed after transformers 5.0
        self._places = tuple(names.index(name) for name in self._arguments)
        return super().wrap(function)


class _PerRow(_Projections):
    """batched_mm: the weight that it is given holds, for each row, that of the row's expert."""

    def patches(self) -> list[tuple[Any, str]]:
        return [(sys.modules[_MOE], "_batched_linear")]

    def operands(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        x, gathered = super().operands(args, kwargs)
        module = (_traced[-1] if _traced else None) if is_compiling() else current_module()
        name = "" if module is None else self._parameter(module, gathered)
        return x, None, gathered if module is None or not name else module._parameters[name]

    def _parameter(self, module: nn.Module, weight: Tensor) -> str:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.ndim == 3 and parameter.shape[1:] == weight.shape[1:]:
                return name
        return ""


class _PerExpert(_Projections):
    """eager: a call of F.linear for each expert that got rows, with its part of the parameter."""

    def patches(self) -> list[tuple[Any, str]]:
        return [(functional, "linear")]

    def operands(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        x, weight = super().operands(args, kwargs)
        base = weight._base
        return x, None, weight if base is None else base

    def _parameter(self, module: nn.Module, weight: Tensor) -> str:
        return super()._parameter(module, weight) if weight.ndim == 3 else ""

    def role_in_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return _NOBODY  # which experts get rows is not known before the graph runs


class _Experts(FunctionSite):
    """All of them: which one a module calls follows from its configuration, and may change."""

    def __init__(self) -> None:
        super().__init__(_ROLE, GROUPED_LINEAR, ())
        self._ways = (
            _Grouped(("input", "offs", "weight")), _PerRow(("input", "weight")), _PerExpert(("input", "weight"))
        )  # fmt: skip

    def patches(self) -> list[tuple[Any, str]]:
        return [(sys.modules[_MOE].ExpertsInterface, "get_interface")]

    def install(self, kind: Kind, tensors: frozenset[str]) -> None:
        super().install(kind, tensors)
        for way in self._ways:
            way.install(kind, tensors)

    def uninstall(self) -> None:
        super().uninstall()
        for way in self._ways:
            way.uninstall()

    def wrap(self, function: _Function) -> _Function:
        @functools.wraps(function)
        def get_interface(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            return functools.partial(_known_to_graphs, found) if is_compiling() else found

        return get_interface


def _known_to_graphs(forward: _Function, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The experts' forward as it is compiled: the module is known while it is traced."""
    _traced.append(module)
    result = forward(module, *args, **kwargs)
    _traced.pop()
    return result


_NOBODY = "nobody"
_EXPERTS = _Experts()


class _RouterLinear(FunctionSite):
    def patches(self) -> list[tuple[Any, str]]:
        return [(functional, "linear")]


_ROUTER = _RouterLinear("router", LINEAR, ("input", "weight"), asks=False)


def find_sites(model: nn.Module) -> dict[str, list[Site]]:
    """The projections of the experts of `model`, and the products of their routers."""
    if _MOE not in sys.modules:
        return {}
    found: dict[str, list[Site]] = {}
    for name, module in model.named_modules():
        if is_experts(module):
            found[name] = [
                _projection(module, parameter)
                for parameter, value in module._parameters.items()
                if value is not None and value.ndim == 3
            ]
        elif _is_router(module):
            found[name] = [Site(module, LINEAR, function=_ROUTER)]
    return found


def is_experts(module: nn.Module) -> bool:
    """Whether these are all experts of a layer, each a part of the same parameters."""
    return hasattr(module.__class__, "_apply_gate")  # what transformers gives every such class


def _projection(module: nn.Module, parameter: str) -> Site:
    layout = "expert,in,out" if getattr(module, "is_transposed", False) else "expert,out,in"
    return Site(
        module, GROUPED_LINEAR, function=_EXPERTS, suffix=parameter, parameter=parameter, role=f"{_ROLE}.{parameter}",
        attributes=(("weight_layout", layout),), describe=_expert,
    )  # fmt: skip


def _expert(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Which expert a call computes, where its weight is a part of the parameter."""
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight._base is None:
        return {}
    whole = weight._base
    return {"expert": (weight.storage_offset() - whole.storage_offset()) // whole.stride(0)}


def _is_router(module: nn.Module) -> bool:
    """It has the weight of a Linear, and computes the product itself."""
    kind: Any = module.__class__
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and weight.ndim == 2
        and kind.__module__.startswith("transformers.")
        and not isinstance(module, nn.Linear | nn.Embedding)
        and calls(kind, "linear")
    )
