"""Bugs of tensor parallelism, for the plugins of `tests.kit.models.megatron_layouts`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

LAYERS = "megatron.core.tensor_parallel.layers"
PRODUCT = "linear_with_grad_accumulation_and_async_allreduce"


class _Done:
    """The handle of a communication that ended at once."""

    def wait(self) -> None: ...


def _in_backward(change: Callable[..., None]) -> None:
    """Let `change` be called in place of the reduce of dX in the backward of the linears."""
    reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op") and sys._getframe(1).f_globals["__name__"] == LAYERS:
            change(reduce, tensor, kwargs.get("group"))
            return _Done()
        return reduce(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce


def without_reduce(_: list[Any], __: Any) -> None:
    """dX of column-parallel linears is not added up."""
    _in_backward(lambda reduce, tensor, group: None)


def reduced_twice(_: list[Any], __: Any) -> None:
    """dX of column-parallel linears is added up again, so it is tp times too large."""

    def twice(reduce: Any, tensor: torch.Tensor, group: Any) -> None:
        reduce(tensor, group=group)
        reduce(tensor, group=group)

    _in_backward(twice)


def bias_on_each_rank(chunks: list[Any], _: Any) -> None:
    """The bias of linear_fc2 is added on each rank, before their products are added up."""
    layers = sys.modules[LAYERS]
    product = getattr(layers, PRODUCT)
    biases = {
        id(module.weight): torch.linspace(-1, 1, module.weight.shape[0], dtype=module.weight.dtype)
        for chunk in chunks
        for name, module in chunk.named_modules()
        if name.endswith("linear_fc2")
    }

    # The function keeps a note of its own as an attribute.
    @functools.wraps(product)
    def biased(*args: Any, **kwargs: Any) -> Any:
        weight = kwargs["weight"] if "weight" in kwargs else args[1]
        bias = biases.get(id(weight))
        return product(*args, **(kwargs if bias is None else {**kwargs, "bias": bias}))

    setattr(layers, PRODUCT, biased)


def gathered_in_wrong_order(chunks: list[Any], _: Any) -> None:
    """The scattered sequence is gathered with the parts of the ranks exchanged."""
    layers = sys.modules[LAYERS]
    gather = layers.dist_all_gather_func

    def exchanged(output: torch.Tensor, part: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        done = gather(output, part, *args, **kwargs)
        if done is not None:
            done.wait()
        output.copy_(output.roll(part.shape[0], 0))
        return None if done is None else _Done()

    layers.dist_all_gather_func = exchanged
