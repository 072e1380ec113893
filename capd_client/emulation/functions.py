"""Functions of torch that modules call for their products: F.scaled_dot_product_attention and F.linear.

Patched once per process, while a module is emulated whose forward calls them; what they run for is told by `calling`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.nn import functional

from capd_client.emulation.plans import EmulationPlan, calling
from capd_client.process.patching import patch
from capd_client.steps import checkpointing

__all__ = ["patch_attention", "patch_linear", "patch_multihead", "patch_once", "within"]

Function = Callable[..., Any]
_SDPA = "scaled_dot_product_attention"
_MULTIHEAD = "multi_head_attention_forward"


def within(
    attention: EmulationPlan | None,
    linear: EmulationPlan | None,
    function: Function,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call `function`, with these plans for the functions that it calls."""
    before = calling.attention, calling.linear
    calling.attention, calling.linear = attention, linear
    try:
        return function(*args, **kwargs)
    finally:
        calling.attention, calling.linear = before


_shared: dict[tuple[int, str], list[Any]] = {}  # who uses a patch, and what undoes it


def patch_once(holder: Any, name: str, wrap: Callable[[Function], Function]) -> Callable[[], None]:
    """Let `wrap(function)` stand for what `holder` has under `name`, once for all emulations; returns what undoes that.

    Below what else capd has put there: captured are the operands as they are.
    """
    key = id(holder), name
    if key not in _shared:
        _shared[key] = [patch(holder, name, wrap, innermost=True)]
    user = object()
    _shared[key].insert(0, user)

    def undo() -> None:
        *users, restore = _shared[key]
        users.remove(user)
        if users:
            _shared[key] = [*users, restore]
        else:
            del _shared[key]
            restore()

    return undo


def patch_attention() -> Iterator[Callable[[], None]]:
    """Patch F.scaled_dot_product_attention, wherever it has been imported; gives what undoes that, piece by piece."""
    yield checkpointing.carry(_taking_plans)
    for holder, name in [(functional, _SDPA), *_importers(torch._C._nn.scaled_dot_product_attention)]:
        yield patch_once(holder, name, _attention)


def patch_linear() -> Iterator[Callable[[], None]]:
    """The same for F.linear."""
    yield checkpointing.carry(_taking_plans)
    yield patch_once(functional, "linear", _linear)


def patch_multihead() -> Iterator[Callable[[], None]]:
    """Both, and have compilers trace the function of nn.MultiheadAttention, which calls them."""
    yield from patch_attention()
    yield from patch_linear()
    yield patch_once(functional, _MULTIHEAD, _traced)


@functools.lru_cache(maxsize=8)
def _traced(function: Function) -> Function:
    """The same code, which a compiled caller looks into: torch's own is one operation of a graph to it.

    The compiler knows that one by its name. Where it first looks while this stands there, it looks behind the mark
    once, and lists what it finds, so there are two of them.
    """
    if not isinstance(function, FunctionType):
        return function
    copy = _copied(function)
    for _ in range(2):
        copy, behind = _copied(function), copy
        copy._torchdynamo_inline = behind  # type: ignore[attr-defined]
    return copy


def _copied(function: FunctionType) -> FunctionType:
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@functools.lru_cache(maxsize=8)  # one for all places, so that who looks for it finds them
def _attention(function: Function) -> Function:
    @functools.wraps(function)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        plan = calling.attention
        if plan is None:
            return function(*args, **kwargs)
        return _attend(plan, function, *args, **kwargs)

    return scaled_dot_product_attention


def _attend(
    plan: EmulationPlan, function: Function, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> Any:
    """Query, key and value may be given by name."""
    return plan.attend(function, query, key, value, *args, **kwargs)


@functools.lru_cache(maxsize=8)
def _linear(function: Function) -> Function:
    @functools.wraps(function)
    def linear(input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002  # as F.linear's own
        plan = calling.linear
        return function(input, weight, bias) if plan is None else plan.multiply(input, weight, bias)

    return linear


def _importers(function: Function) -> Iterator[tuple[Any, str]]:
    """Modules outside of torch that have imported the function, also where capd has put something around it."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and (module.__name__ or "").partition(".")[0] not in (
            "torch",
            "capd_client",
        ):
            for name, value in list(vars(module).items()):
                if value is function or (hasattr(value, "__wrapped__") and _is_around(value, function)):
                    yield module, name


def _is_around(value: Any, function: Function) -> bool:
    try:
        return inspect.unwrap(value) is function
    except Exception:  # some object of the job's, with attributes of its own making
        return False


def _taking_plans(function: Function) -> Function:
    """A segment that is run again in the backward is not within its module's forward then: it takes the plans along."""
    attention, linear = calling.attention, calling.linear
    if attention is None and linear is None:
        return function
    return functools.partial(within, attention, linear, function)
