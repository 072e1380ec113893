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
from types import ModuleType
from typing import Any, Optional

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from capd_client.hooks.function_sites import FunctionSite
from capd_client.hooks.owners import current_module
from capd_client.hooks.sites import Site, operands_of
from capd_client.integrations.callers import calls
from capd_client.protocol.kinds import GROUPED_LINEAR, LINEAR

__all__ = ["find_sites", "is_experts"]

_MOE = "transformers.integrations.moe"
_ROLE = "experts"
# The role of a call whose experts are unknown: no owner has a tap on it.
_NOBODY = "nobody"
_PLAIN = ("input", "weight")
_Function = Callable[..., Any]
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]

# The experts whose forward is being compiled.
_traced: list[nn.Module] = []


@functools.cache
def _function_of(moe: ModuleType) -> FunctionSite:
    """Return the functions of all ways. A module's configuration selects one of them, and the selection may change."""
    # The order of the parameters changed after transformers 5.0.
    names = list(inspect.signature(moe._grouped_linear).parameters)
    places = [names.index(name) for name in ("input", "offs", "weight")]

    def grouped(args: _Args, kwargs: _Kwargs) -> _Args:
        return tuple(args[at] if at < len(args) else kwargs.get(names[at]) for at in places)

    ways = (
        _way(moe, "_grouped_linear", grouped, _role_of),
        _way(moe, "_batched_linear", _per_row, _role_of),
        _way(
            functional, "linear", _per_expert, lambda weight: _NOBODY if is_compiling() else _role_of(weight)
        ),
    )
    return FunctionSite(
        _ROLE, GROUPED_LINEAR, (), lambda: [(moe.ExpertsInterface, "get_interface")], asks=False,
        replaced=_known_to_graphs, others=ways,
    )  # fmt: skip


def _way(
    home: Any, name: str, read: Callable[[_Args, _Kwargs], _Args], role_of: Callable[[Tensor], str]
) -> FunctionSite:
    """Return a function that computes one projection, of all experts or of one.

    Args:
        home: The module of the function.
        name: The function's name.
        read: Returns the input, the offsets or None, and the parameter of a call.
        role_of: Returns the role of a call with this parameter.
    """
    return FunctionSite(
        _ROLE, GROUPED_LINEAR, ("input",), lambda: [(home, name)], asks=False, read=read,
        role_of=lambda args, kwargs: role_of(read(args, kwargs)[-1]),
    )  # fmt: skip


def _per_row(args: _Args, kwargs: _Kwargs) -> _Args:
    """Read a call of "batched_mm". Its weight argument holds the weight of the row's expert for each row."""
    x, gathered = operands_of(_PLAIN, args, kwargs)
    for parameter in _parameters().values():
        if parameter is not None and parameter.ndim == 3 and parameter.shape[1:] == gathered.shape[1:]:
            return x, None, parameter
    return x, None, gathered


def _per_expert(args: _Args, kwargs: _Kwargs) -> _Args:
    """Read a call of "eager": F.linear for each expert that got rows. Its weight is a part of the parameter."""
    x, weight = operands_of(_PLAIN, args, kwargs)
    return x, None, weight if weight._base is None else weight._base


def _parameters() -> dict[str, Optional[nn.Parameter]]:
    """Return the parameters of the experts whose forward runs or is being compiled."""
    module = (_traced[-1] if _traced else None) if is_compiling() else current_module()
    return {} if module is None else module._parameters


def _role_of(weight: Tensor) -> str:
    for name, parameter in _parameters().items():
        if parameter is weight:
            return f"{_ROLE}.{name}"
    return _NOBODY


def _known_to_graphs(function: _Function) -> _Function:
    """Return the function that gives experts their forward. A forward that is compiled knows its module."""

    @functools.wraps(function)
    def get_interface(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        return functools.partial(_with_module, found) if is_compiling() else found

    return get_interface


def _with_module(forward: _Function, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the experts' forward while it is compiled."""
    _traced.append(module)
    result = forward(module, *args, **kwargs)
    _traced.pop()
    return result


_ROUTER = FunctionSite("router", LINEAR, ("input", "weight"), lambda: [(functional, "linear")], asks=False)


def find_sites(model: nn.Module) -> dict[str, list[Site]]:
    """Return the projections of the experts of `model` and the products of their routers, by qualified names."""
    moe = sys.modules.get(_MOE)
    if moe is None:
        return {}
    found: dict[str, list[Site]] = {}
    for name, module in model.named_modules():
        if is_experts(module):
            found[name] = [
                _projection(module, parameter, _function_of(moe))
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


def _projection(module: nn.Module, parameter: str, function: FunctionSite) -> Site:
    layout = "expert,in,out" if getattr(module, "is_transposed", False) else "expert,out,in"
    return Site(
        module, GROUPED_LINEAR, function=function, suffix=parameter, parameter=parameter, role=f"{_ROLE}.{parameter}",
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
