"""The calls of `megatron.core.tensor_saver`: code written for it runs with only the import line changed.

    from capd_client.tensor_saver import get_tensor_saver, save_attention_tensors, save_linear_tensors, save_tensor

Signatures, positional order and defaults are the union of tensor_saver's versions. docs/migration.md has the meaning
and the differences of each call. Names and layer numbers are recorded as the caller passes them.

A call returns a reference (`capd_client.protocol.reference`) for each tensor, or None if nothing was captured. Calls
raise nothing, and this process writes no files.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Optional, ParamSpec, TypeVar

import torch

from capd_client.process.dynamo import untraced
from capd_client.tensor_saver.indices import get_rank_from_tensor_device
from capd_client.tensor_saver.layer_passes import TensorIndexManager, get_tensor_index_manager
from capd_client.tensor_saver.saver import TensorSaver, get_tensor_saver
from capd_client.tensor_saver.state import (
    TensorCollectionState,
    get_current_rank_and_sample,
    get_tensor_collection_state,
    initialize_tensor_collection,
)

__all__ = [
    "TensorCollectionState", "TensorIndexManager", "TensorSaver", "get_current_rank", "get_current_rank_and_sample",
    "get_rank_from_tensor_device", "get_tensor_collection_state", "get_tensor_index_manager", "get_tensor_saver",
    "initialize_tensor_collection", "mark_collection_completed", "save_attention_tensors", "save_linear_tensors",
    "save_tensor", "set_enabled", "set_global_batch_idx", "set_global_iteration", "set_global_rank",
    "set_global_sample_idx", "set_global_sequence_idx", "set_iteration", "set_save_dir", "should_collect_tensor",
]  # fmt: skip


# The most frequent call: without `_method` it takes 0.3 µs less.
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


_Owner = TypeVar("_Owner")
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _method(
    owner: Callable[[], _Owner], method: Callable[Concatenate[_Owner, _Parameters], _Result]
) -> Callable[_Parameters, _Result]:
    """Return a function that calls this method of the object that `owner` returns."""

    @untraced
    @functools.wraps(method, assigned=("__name__", "__doc__"))
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(owner(), method.__name__)(*args, **kwargs)

    _, *parameters = inspect.signature(method).parameters.values()
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


save_attention_tensors = _method(get_tensor_saver, TensorSaver.save_attention_tensors)
save_linear_tensors = _method(get_tensor_saver, TensorSaver.save_linear_tensors)
set_iteration = _method(get_tensor_saver, TensorSaver.set_iteration)
mark_collection_completed = _method(get_tensor_saver, TensorSaver.mark_collection_completed)
should_collect_tensor = _method(get_tensor_saver, TensorSaver.should_collect_tensor)
set_enabled = _method(get_tensor_saver, TensorSaver.set_enabled)
set_save_dir = _method(get_tensor_saver, TensorSaver.set_save_dir)
set_global_rank = _method(get_tensor_collection_state, TensorCollectionState.set_rank)
set_global_sample_idx = _method(get_tensor_collection_state, TensorCollectionState.set_sample_idx)
set_global_iteration = _method(get_tensor_collection_state, TensorCollectionState.set_iteration)
set_global_batch_idx = _method(get_tensor_collection_state, TensorCollectionState.set_batch_idx)
set_global_sequence_idx = _method(get_tensor_collection_state, TensorCollectionState.set_sequence_idx)
get_current_rank = _method(get_tensor_collection_state, TensorCollectionState.get_rank)
