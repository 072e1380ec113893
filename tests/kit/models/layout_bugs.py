"""Bugs of parallel training, to be put into `tests.kit.models.megatron_layouts` by its argument `plugin`.

Each function is called with the chunks and the layout of a rank, after `watch` and before training. Where a bug has a
place, it is in layer 1.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

LAYER = 1


def norm_gradient_not_reduced(chunks: Any, layout: Any) -> None:
    """Under sequence parallelism, the first norm of the layer keeps the gradient of its rank's tokens."""
    for parameter in _layer(chunks).input_layernorm.parameters():
        parameter.sequence_parallel = False


def bias_twice(chunks: Any, layout: Any) -> None:
    """The second linear of the MLP adds its bias, and the residual addition adds it again."""
    linear = _layer(chunks).mlp.linear_fc2
    linear.register_forward_hook(lambda module, args, output: (output[0] + output[1], output[1]))


def gate_and_up_swapped(chunks: Any, layout: Any) -> None:
    """The halves of the first linear of the MLP are in the wrong order."""
    weight = _layer(chunks).mlp.linear_fc1.weight
    with torch.no_grad():
        weight.copy_(torch.cat(list(reversed(weight.chunk(2)))))


def weight_scaled(chunks: Any, layout: Any) -> None:
    """The second linear of the MLP has a weight that is 5 % too large."""
    with torch.no_grad():
        _layer(chunks).mlp.linear_fc2.weight.mul_(1.05)


def contiguous_data(chunks: Any, layout: Any) -> None:
    """Context parallel ranks get contiguous parts of the sequence, and their attention expects the zigzag."""
    job: Any = importlib.import_module("tests.kit.models.megatron_layouts")
    job.positions = lambda sequence, rank, size: torch.arange(sequence).chunk(size)[rank]


def keys_of_another_group(chunks: Any, layout: Any) -> None:
    """With fewer groups than ranks, each rank attends to the key and value of the wrong group."""
    attention, size = _layer(chunks).self_attention, layout.tp
    own = attention.get_query_key_value_tensors

    def wrong(*args: Any, **kwargs: Any) -> Any:
        query, key, value, *rest = own(*args, **kwargs)
        return (query, _of_rank(key, size), _of_rank(value, size), *rest)

    attention.get_query_key_value_tensors = wrong


def _of_rank(tensor: Tensor, size: int) -> Tensor:
    """The numbers of the rank half the group away, with this rank's gradient."""
    parts = [torch.empty_like(tensor) for _ in range(size)]
    torch.distributed.all_gather(parts, tensor.detach().contiguous())
    rank = torch.distributed.get_rank()
    return tensor + (parts[(rank + size // 2) % size] - tensor).detach()


def loss_over_cp_twice(chunks: Any, layout: Any) -> None:
    """The loss is divided by the context parallel size once more."""
    _divide_loss(layout.cp)


def loss_over_micro_batches_twice(chunks: Any, layout: Any) -> None:
    """The loss is divided by the micro-batches once more."""
    _divide_loss(layout.micro_batches)


def output_not_reduced(chunks: Any, layout: Any) -> None:
    """The terms of the second linear of the MLP are not added up over the ranks."""
    _layer(chunks).mlp.linear_fc2.explicit_expert_comm = True


def _layer(chunks: Any) -> Any:
    return chunks[0].module.decoder.layers[LAYER]


def _divide_loss(by: int) -> None:
    job: Any = importlib.import_module("tests.kit.models.megatron_layouts")
    own = job.summed_loss

    def divided(losses: Tensor, layout: Any) -> Any:
        loss, *rest = own(losses, layout)
        return (loss / by, *rest)

    job.summed_loss = divided
