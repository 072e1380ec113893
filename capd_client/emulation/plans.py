"""The plan of each emulated module, and the plan of the module that a patched function runs for.

A module is recognised by identity. A deep or pickled copy of it computes as its class does. Compiled graphs do not
check identities, so that the layers of a model can share one graph. They check the attribute, which copies and
pickles leave out (`capd_client.hooks.copies`).
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
from capd_client.emulation.quantise import cast, straight_through
from capd_client.emulation.words import Words
from capd_client.hooks import copies

__all__ = ["EmulationPlan", "calling", "give", "plan_of", "take"]


class EmulationPlan(NamedTuple):
    """The products of a module, the same for all modules of a recipe. A part that is None is not emulated.

    evaluation: Whether forwards without training are emulated, too.
    """

    linear: Optional[Words] = None
    qk: Optional[Words] = None
    pv: Optional[Words] = None
    exact: bool = False
    evaluation: bool = False

    def multiply(self, x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        """Return x · weightᵀ + bias for x [..., in] and weight [out, in].

        If linears are not emulated, it is F.linear.
        """
        return products.linear(x, weight, bias, self.linear or Words())

    def scores(self, q: Tensor, k_t: Tensor) -> Tensor:
        """Return q @ k_t, the first product of an unfused attention: [..., m, k] and [..., k, n]."""
        return _product(q, k_t, self.qk, exact=self.exact)

    def weighted(self, weights: Tensor, v: Tensor) -> Tensor:
        """Return weights @ v, the second product. In the straight-through level the weights are not quantised."""
        if self.exact or self.pv is None:
            return _product(weights, v, self.pv, exact=True)
        return _product(weights, v, self.pv._replace(a=""), exact=False)

    def attend(
        self, attention: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return the result of F.scaled_dot_product_attention. `attention` is the function itself."""
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
    """Return the plan of this call of the module's forward. None if it computes as its class does."""
    plan: Optional[EmulationPlan] = module.__dict__.get(copies.EMULATION)
    if plan is None or not (is_compiling() or id(module) in _modules):
        return None
    # The first pass of a checkpointed segment has no gradients, but is in training.
    return plan if module.training or torch.is_grad_enabled() or plan.evaluation else None


class _Calling(threading.local):
    """The plans of a thread. Both attributes exist from the start: a graph may not see an absent attribute appear."""

    def __init__(self) -> None:
        self.attention: Optional[EmulationPlan] = None
        self.linear: Optional[EmulationPlan] = None


calling = _Calling()
"""The plan of the module whose forward this thread is in, for each function that such a forward may call."""
