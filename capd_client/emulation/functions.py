"""The patches of torch's functions that modules call for their products: F.scaled_dot_product_attention and F.linear.

Each function is patched while a module is emulated whose forward calls it, below capd's other patches: so operands are
captured before they are quantised. `calling` names the plan that the function runs for.
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

__all__ = ["patch_attention", "patch_linear", "patch_multihead", "within"]

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
    """Call `function` with these plans for the functions that it calls."""
    before = calling.attention, calling.linear
    calling.attention, calling.linear = attention, linear
    try:
        return function(*args, **kwargs)
    finally:
        calling.attention, calling.linear = before


def patch_attention() -> Iterator[Callable[[], None]]:
    """Patch F.scaled_dot_product_attention wherever it has been imported.

    Yields the functions that undo the patches.
    """
    yield checkpointing.carry(_taking_plans)
    for holder, name in [(functional, _SDPA), *_importers(torch._C._nn.scaled_dot_product_attention)]:
        yield patch(holder, name, _attention, innermost=True)


def patch_linear() -> Iterator[Callable[[], None]]:
    """Patch F.linear. Yields the functions that undo the patch."""
    yield checkpointing.carry(_taking_plans)
    yield patch(functional, "linear", _linear, innermost=True)


def patch_multihead() -> Iterator[Callable[[], None]]:
    """Patch both functions, and have compilers trace the function of nn.MultiheadAttention, which calls them."""
    yield from patch_attention()
    yield from patch_linear()
    yield patch(functional, _MULTIHEAD, _traced, innermost=True)


@functools.lru_cache(maxsize=8)
def _traced(function: Function) -> Function:
    """Return the same code as a function that compilers trace. torch's own function is one operation of a graph.

    The compiler recognises torch's function by its name. If the compiler looks first while the copy is patched in,
    it unwraps the mark once and lists the result. So two copies are needed.
    """
    if not isinstance(function, FunctionType):
        return function
    copy = _copied(function)
    for _ in range(2):
        copy, inner = _copied(function), copy
        copy._torchdynamo_inline = inner  # type: ignore[attr-defined]
    return copy


def _copied(function: FunctionType) -> FunctionType:
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# All places get the same function, so that a search for it finds them.
@functools.lru_cache(maxsize=8)
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
    """Attend by the plan. The job may pass query, key and value by name."""
    return plan.attend(function, query, key, value, *args, **kwargs)


@functools.lru_cache(maxsize=8)
def _linear(function: Function) -> Function:
    @functools.wraps(function)
    def linear(input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002  # as F.linear's own
        plan = calling.linear
        return function(input, weight, bias) if plan is None else plan.multiply(input, weight, bias)

    return linear


def _importers(function: Function) -> Iterator[tuple[Any, str]]:
    """Yield the modules outside torch that have imported the function, also if capd has wrapped it there."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and (module.__name__ or "").partition(".")[0] not in (
            "torch",
            "capd_client",
        ):
            for name, value in list(vars(module).items()):
                # By its type, since attributes of other objects may be computed: those of a lazy module import it.
                if value is function or (type(value) is FunctionType and _is_around(value, function)):
                    yield module, name


def _is_around(value: Function, function: Function) -> bool:
    try:
        return inspect.unwrap(value) is function
    except Exception:
        # What a function of the job says to be around may be anything.
        return False


def _taking_plans(function: Function) -> Function:
    """Bind the current plans to `function`.

    A segment that runs again in the backward is outside its module's forward.
    """
    attention, linear = calling.attention, calling.linear
    if attention is None and linear is None:
        return function
    return functools.partial(within, attention, linear, function)
