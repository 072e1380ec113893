"""TransformerEngine's `make_graphed_callables`: its rule of hooks, its warm-up, what it puts in place; no graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def make_graphed_callables(
    modules: tuple[nn.Module, ...],
    sample_args: tuple[tuple[Tensor, ...], ...],
    num_warmup_iters: int = 3,
    _order: list[int] | None = None,
) -> tuple[Any, ...]:
    for module in modules:
        hooks = (*module._backward_hooks, *module._forward_hooks, *module._forward_pre_hooks)
        assert not hooks, "Modules must not have hooks registered at the time they are passed."
    made: list[Any] = []
    for module, args in zip(modules, sample_args, strict=True):
        for _ in range(num_warmup_iters):
            warmed = [inner.register_forward_hook(lambda *_: None) for inner in module.modules()]
            torch.autograd.grad(module(*args).sum(), list(module.parameters()))
            for hook in warmed:
                hook.remove()
        forward = _graphed_forward(module, module.training, module.forward)
        if _order is None:
            module.forward = forward
        made.append(module if _order is None else forward)
    return tuple(made)


def _graphed_forward(
    func: nn.Module, graph_training_state: bool, orig_fwd: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    parameters = tuple(func.parameters())

    def new_fwd(*user_args: Any) -> Tensor:
        if func.training == graph_training_state:
            return _Replay.apply(*user_args, *parameters)
        return orig_fwd(*user_args)

    return new_fwd


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient * 2, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)
