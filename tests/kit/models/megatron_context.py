"""A core attention for context parallelism on a CPU: megatron-core has one only in TransformerEngine.

Each rank has its queries, and gathers the keys and values of all. Ranks hold parts of the sequence as Megatron deals
them out: of 2 · size chunks, rank r has chunk r and chunk 2 · size - 1 - r.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

__all__ = ["gathering", "order", "positions"]


def positions(sequence: int, rank: int, size: int) -> Tensor:
    """Where in the sequence the tokens of a rank stand, in its order."""
    if size == 1:
        return torch.arange(sequence)
    chunks = torch.arange(sequence).chunk(2 * size)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def order(sequence: int, size: int) -> Tensor:
    """Where in the sequence the tokens of all ranks stand, one rank behind the other."""
    return torch.cat([positions(sequence, rank, size) for rank in range(size)])


def gathering() -> type:
    """The class that stands in the place of DotProductAttention in a layer's spec."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class GatheringAttention(DotProductAttention):  # type: ignore[misc]  # megatron-core has no types
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            own = copy.copy(config)
            own.context_parallel_size = 1  # which is what it asserts
            super().__init__(own, *args, **kwargs)

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any
        ) -> Tensor:
            group = parallel_state.get_context_parallel_group()
            size, rank = group.size(), group.rank()
            key, value = (gather_from_sequence_parallel_region(part, group=group) for part in (key, value))
            length = key.shape[0]
            mask = attention_mask[:, :, positions(length, rank, size)][:, :, :, order(length, size)]
            attended: Tensor = super().forward(query, key, value, mask, *args, **kwargs)
            return attended

    return GatheringAttention
