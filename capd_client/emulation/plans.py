"""What each emulated module computes with, and which module a patched function runs for.

A module is recognised by identity: a copy of it, deep or from a pickle, computes as its class does. Compiled graphs
are not told identities, so that the layers of a model can share one; they go by the attribute, which copies and pickles
leave out (`capd_client.hooks.copies`).
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from capd_client.emulation import products
from capd_client.emulation.attention import can_quantise, exact, fused
from capd_client.emulation.products import Words
from capd_client.emulation.quantise import cast, straight_through
from capd_client.hooks import copies

__all__ = ["EmulationPlan", "calling", "give", "plan_of", "take"]


class EmulationPlan(NamedTuple):
    """The products of one module: the same for all modules of a recipe. None: not emulated.

    evaluation: also where nothing is trained.
    """

    linear: Optional[Words] = None
    qk: Optional[Words] = None
    pv: Optional[Words] = None
    exact: bool = False
    evaluation: bool = False

    def multiply(self, x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        """x · weightᵀ + bias, x [..., in], weight [out, in]; as F.linear where linears are not emulated."""
        return products.linear(x, weight, bias, self.linear or Words())

    def scores(self, q: Tensor, k_t: Tensor) -> Tensor:
        """q @ k_t, the first product of an attention that multiplies by itself: [..., m, k] and [..., k, n]."""
        return _product(q, k_t, self.qk, exact=self.exact)

    def weighted(self, weights: Tensor, v: Tensor) -> Tensor:
        """weights @ v, the second product; in the straight-through level the weights are not quantised."""
        if self.exact or self.pv is None:
            return _product(weights, v, self.pv, exact=True)
        return _product(weights, v, self.pv._replace(a=""), exact=False)

    def attend(
        self, attention: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """What F.scaled_dot_product_attention gives; `attention` is the function itself."""
        operands = query, key, value
        if not can_quantise(*operands):
            return attention(*operands, *args, **kwargs)  # type: ignore[no-any-return]
        if self.exact:
            return exact(self.qk, self.pv, *operands, *args, **kwargs)
        return fused(attention, self.qk, self.pv, operands, *args, **kwargs)


def _product(a: Tensor, b: Tensor, words: Optional[Words], *, exact: bool) -> Tensor:
    if words is None or not can_quantise(a, b):
        return a @ b
    if exact:
        return products.product(a, b, words)
    return straight_through(cast(a), words.a, -1) @ straight_through(cast(b), words.b, -2)


_modules: dict[int, weakref.ref[nn.Module]] = {}


def give(module: nn.Module, plan: EmulationPlan) -> None:
    """Emulate the module from now on."""
    number = id(module)
    _modules[number] = weakref.ref(module, lambda _: _modules.pop(number, None))
    vars(module)[copies.EMULATION] = plan


def take(module: nn.Module) -> None:
    """Undo `give`."""
    _modules.pop(id(module), None)
    vars(module).pop(copies.EMULATION, None)


def plan_of(module: nn.Module) -> Optional[EmulationPlan]:
    """What this call of the module's forward computes with; None: as its class does."""
    plan: Optional[EmulationPlan] = module.__dict__.get(copies.EMULATION)
    if plan is None or not (is_compiling() or id(module) in _modules):
        return None
    # The first pass of a checkpointed segment has no gradients either, but is in training.
    return plan if module.training or torch.is_grad_enabled() or plan.evaluation else None


class _Calling(threading.local):
    """Both are the instance's from its beginning: a graph may not see an attribute appear that it has looked for."""

    def __init__(self) -> None:
        self.attention: Optional[EmulationPlan] = None
        self.linear: Optional[EmulationPlan] = None


calling = _Calling()
"""The plan of the module whose forward this thread is in, for each function that such a forward may call."""
