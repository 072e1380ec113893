"""The calls of `megatron.core.tensor_saver`: code written for it runs with only the import line changed.

    from capd_client.tensor_saver import get_tensor_saver, save_attention_tensors, save_linear_tensors, save_tensor

Signatures, positional order and defaults are the union of tensor_saver's versions. docs/migration.md has the meaning
and the differences of each call. Names and layer numbers are recorded as the caller passes them.

A call returns a reference (`capd_client.protocol.reference`) for each tensor, or None if nothing was captured. Calls
raise nothing, and this process writes no files.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from capd_client.process.dynamo import untraced
from capd_client.tensor_saver.indices import get_rank_from_tensor_device
from capd_client.tensor_saver.layer_passes import TensorIndexManager, get_tensor_index_manager
from capd_client.tensor_saver.saver import TensorSaver, get_tensor_saver
from capd_client.tensor_saver.state import (
    TensorCollectionState,
    get_current_rank,
    get_current_rank_and_sample,
    get_tensor_collection_state,
    initialize_tensor_collection,
    set_global_batch_idx,
    set_global_iteration,
    set_global_rank,
    set_global_sample_idx,
    set_global_sequence_idx,
)

__all__ = [
    "TensorCollectionState", "TensorIndexManager", "TensorSaver", "get_current_rank", "get_current_rank_and_sample",
    "get_rank_from_tensor_device", "get_tensor_collection_state", "get_tensor_index_manager", "get_tensor_saver",
    "initialize_tensor_collection", "mark_collection_completed", "save_attention_tensors", "save_linear_tensors",
    "save_tensor", "set_enabled", "set_global_batch_idx", "set_global_iteration", "set_global_rank",
    "set_global_sample_idx", "set_global_sequence_idx", "set_iteration", "set_save_dir", "should_collect_tensor",
]  # fmt: skip


@untraced
def save_tensor(
    tensor: torch.Tensor,
    layer_type: str,
    operation: str,
    quant_type: str,
    tensor_name: str,
    layer_idx: Optional[int] = None,
    phase: str = "unknown",
    component: str = "unknown",
    rank: Optional[int] = None,
    sample_idx: Optional[int] = None,
    metadata: Optional[dict[str, Any]] = None,
) -> Optional[str]:
    """Call `get_tensor_saver().save_tensor(…)`."""
    return get_tensor_saver().save_tensor(
        tensor, layer_type, operation, quant_type, tensor_name, layer_idx, phase, component, rank, sample_idx, metadata
    )  # fmt: skip


@untraced
def save_attention_tensors(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    quant_type: str,
    operation: str = "forward",
    layer_idx: Optional[int] = None,
    phase: str = "pre",
    component: str = "FA",
    rank: Optional[int] = None,
    sample_idx: Optional[int] = None,
    attention_weights: Optional[torch.Tensor] = None,
    metadata: Optional[dict[str, Any]] = None,
) -> dict[str, Optional[str]]:
    """Call `get_tensor_saver().save_attention_tensors(…)`."""
    return get_tensor_saver().save_attention_tensors(
        query, key, value, quant_type, operation, layer_idx, phase, component, rank, sample_idx, attention_weights,
        metadata,
    )  # fmt: skip


@untraced
def save_linear_tensors(
    input_tensor: torch.Tensor,
    weight: torch.Tensor,
    quant_type: str,
    operation: str = "forward",
    layer_idx: Optional[int] = None,
    phase: str = "pre",
    component: str = "linear",
    rank: Optional[int] = None,
    sample_idx: Optional[int] = None,
    metadata: Optional[dict[str, Any]] = None,
) -> dict[str, Optional[str]]:
    """Call `get_tensor_saver().save_linear_tensors(…)`."""
    return get_tensor_saver().save_linear_tensors(
        input_tensor, weight, quant_type, operation, layer_idx, phase, component, rank, sample_idx, metadata
    )


def set_iteration(iteration: int) -> None:
    """Call `get_tensor_saver().set_iteration(iteration)`."""
    get_tensor_saver().set_iteration(iteration)


def mark_collection_completed() -> None:
    """Call `get_tensor_saver().mark_collection_completed()`."""
    get_tensor_saver().mark_collection_completed()


def should_collect_tensor() -> bool:
    """Call `get_tensor_saver().should_collect_tensor()`."""
    return get_tensor_saver().should_collect_tensor()


def set_enabled(enabled: bool) -> None:
    """Call `get_tensor_saver().set_enabled(enabled)`."""
    get_tensor_saver().set_enabled(enabled)


def set_save_dir(save_dir: str) -> None:
    """Call `get_tensor_saver().set_save_dir(save_dir)`."""
    get_tensor_saver().set_save_dir(save_dir)
