"""Mixtures of experts in Hugging Face transformers 5: two parameters with a weight for each expert, and a router.

An experts module holds the up projections of all experts in one parameter with three dimensions. Another parameter
holds the down projections. The setting `experts_implementation` decides how they are multiplied:

- "grouped_mm" (the default): each projection is one product over rows sorted by expert. Its record's `offsets` are
  the
ends of the experts' rows.
- "eager": each expert that got rows has its own product. Each product is one record whose metadata names the
  expert.
- "batched_mm": every row is computed by itself, in the order of the tokens' choices.

Up to transformers 4.57 experts and router are nn.Linear, so this module does nothing.
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

# The experts whose forward is being compiled.
_traced: list[nn.Module] = []


class _Projections(FunctionSite):
    """A function that computes one projection, of all experts or of one.

    arguments: The names that the function gives the operands and the weight.
    """

    def __init__(self, arguments: tuple[str, ...]) -> None:
        super().__init__(_ROLE, GROUPED_LINEAR, arguments, asks=False)
        # The positions of these arguments.
        self._places = tuple(range(len(arguments)))

    def operands(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        given = zip(self._arguments, self._places, strict=True)
        return tuple(args[place] if place < len(args) else kwargs.get(name) for name, place in given)

    def _with(
        self, operands: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # transformers passes the input first, and no operand after it changes.
        return (operands[0], *args[1:]), kwargs

    def tap_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optional[Tap]:
        module = current_module()
        name = "" if module is None else self._parameter(module, self.operands(args, kwargs)[-1])
        return current_tap(f"{_ROLE}.{name}") if name else None

    def role_in_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        name = self._parameter(_traced[-1], self.operands(args, kwargs)[-1]) if _traced else ""
        return f"{_ROLE}.{name}"

    def _parameter(self, module: nn.Module, weight: Tensor) -> str:
        """Return the name of the module's parameter that `weight` is. Return "" if it is none."""
        for name, parameter in module._parameters.items():
            if parameter is weight:
                return name
        return ""


class _Grouped(_Projections):
    def patches(self) -> list[tuple[Any, str]]:
        return [(sys.modules[_MOE], "_grouped_linear")]

    def wrap(self, function: _Function) -> _Function:
        # The order of the parameters changed after transformers 5.0.
        names = list(inspect.signature(function).parameters)
        self._places = tuple(names.index(name) for name in self._arguments)
        return super().wrap(function)


class _PerRow(_Projections):
    """The function of "batched_mm". Its weight argument holds the weight of the row's expert for each row."""

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
    """The function of "eager": a call of F.linear per expert that got rows. Its weight is a part of the parameter."""

    def patches(self) -> list[tuple[Any, str]]:
        return [(functional, "linear")]

    def operands(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        x, weight = super().operands(args, kwargs)
        base = weight._base
        return x, None, weight if base is None else base

    def _parameter(self, module: nn.Module, weight: Tensor) -> str:
        return super()._parameter(module, weight) if weight.ndim == 3 else ""

    def role_in_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        # The experts that get rows are unknown before the graph runs.
        return _NOBODY


class _Experts(FunctionSite):
    """All three functions. A module's configuration selects one of them, and the selection may change."""

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
    """Run the experts' forward while it is compiled. The module is known during the tracing."""
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
    """Return the projections of the experts of `model` and the products of their routers, by qualified names."""
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
    """Whether the module holds all experts of a layer, each a part of the same parameters."""
    # transformers gives this method to every class of experts.
    return hasattr(module.__class__, "_apply_gate")


def _projection(module: nn.Module, parameter: str) -> Site:
    layout = "expert,in,out" if getattr(module, "is_transposed", False) else "expert,out,in"
    return Site(
        module, GROUPED_LINEAR, function=_EXPERTS, suffix=parameter, parameter=parameter, role=f"{_ROLE}.{parameter}",
        attributes=(("weight_layout", layout),), describe=_expert,
    )  # fmt: skip


def _expert(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the expert that a call computes, if its weight is a part of the parameter."""
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight._base is None:
        return {}
    whole = weight._base
    return {"expert": (weight.storage_offset() - whole.storage_offset()) // whole.stride(0)}


def _is_router(module: nn.Module) -> bool:
    """Whether the module has the weight of a Linear and computes the product itself."""
    kind: Any = module.__class__
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and weight.ndim == 2
        and kind.__module__.startswith("transformers.")
        and not isinstance(module, nn.Linear | nn.Embedding)
        and calls(kind, "linear")
    )
