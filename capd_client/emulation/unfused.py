"""The unfused products: intercepts the two products of a written-out attention and computes them by a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from capd_client.emulation.plans import EmulationPlan

__all__ = ["UnfusedProducts"]

_MATMUL = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__})


class UnfusedProducts(TorchFunctionMode):
    """A mode for one call of an attention. A recomputed call enters it again.

    The products are those of Megatron (torch.baddbmm, torch.bmm) or of transformers (torch.matmul, once for the
    scores, then once for the values).
    """

    def __init__(self, plan: EmulationPlan) -> None:
        super().__init__()
        self._plan = plan
        # The products that the next calls of matmul compute.
        self._next: list[Callable[[Tensor, Tensor], Tensor]] = [plan.scores, plan.weighted]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.baddbmm and self._plan.qk is not None:
            return self._scaled_scores(*args, **kwargs)
        if function is torch.bmm and not kwargs:
            return self._plan.weighted(*args)
        if function in _MATMUL and not kwargs and self._next:
            return self._next.pop(0)(*args)
        return function(*args, **kwargs)

    def _scaled_scores(
        self, added: Tensor, q: Tensor, k_t: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        scores = alpha * self._plan.scores(q, k_t)
        return scores if beta == 0 else scores + beta * added
