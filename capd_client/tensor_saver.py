"""The predecessor's calls: code written for `megatron.core.tensor_saver` runs with the import line changed.

    from capd_client.tensor_saver import get_tensor_saver, save_attention_tensors, save_linear_tensors, save_tensor

Signatures, positional order and defaults are the predecessor's, the union over its versions; what each call means now,
and where it differs, is in docs/migration.md. Names and layer numbers are recorded as they are given. A call returns a
reference (`capd_client.reference`) for each tensor, None where nothing was captured; nothing is raised, and nothing is
written by the process itself.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Optional

import torch

from capd_client import api
from capd_client.collection_state import STATE, TensorCollectionState, get_rank_from_tensor_device, sample_of
from capd_client.config import EMBEDDED_STORE
from capd_client.errors import ConfigError
from capd_client.told_capture import capture_as_told, sorted_out
from capd_client.untraced import untraced

__all__ = [
    "TensorCollectionState", "TensorSaver", "get_current_rank", "get_current_rank_and_sample",
    "get_rank_from_tensor_device", "get_tensor_collection_state", "get_tensor_saver", "initialize_tensor_collection",
    "mark_collection_completed", "save_attention_tensors", "save_linear_tensors", "save_tensor", "set_global_batch_idx",
    "set_global_iteration", "set_global_rank", "set_global_sample_idx", "set_global_sequence_idx", "set_iteration",
    "should_collect_tensor",
]  # fmt: skip

logger = logging.getLogger("capd_client")
_saver: Optional[TensorSaver] = None


class TensorSaver:
    """What the predecessor's saver was: captures while `enabled`.

    save_dir: directory of the runs, where this process starts a daemon of its own because nothing else says where
    captures go; otherwise the daemon has its store. enabled: False captures nothing.
    """

    def __init__(self, save_dir: str = EMBEDDED_STORE, enabled: bool = True) -> None:
        self.save_dir = Path(save_dir)
        self.enabled = enabled
        self.tensor_counter = 0  # of the tensors that this saver has captured
        self.micro_batch_count = 0
        self.control_micro_batches = 1
        self.collection_completed = False
        self.tensor_collected_in_warmup = False
        self._in_vain = False  # it has asked for a session, and there is none

    @property
    def current_iteration(self) -> int:
        """The iteration of `get_tensor_collection_state()`."""
        return STATE.get_iteration()

    @current_iteration.setter
    def current_iteration(self, iteration: int) -> None:
        STATE.current_iteration = iteration

    def set_iteration(self, iteration: int) -> None:
        """Record further captures in this iteration."""
        self.micro_batch_count = 0
        STATE.set_iteration(iteration)

    def mark_collection_completed(self) -> None:
        """Have `should_exit_after_forward` say so. What is captured does not depend on it."""
        self.collection_completed = True

    def should_exit_after_forward(self) -> bool:
        """Whether this saver captures and `mark_collection_completed` was called."""
        return bool(self.enabled and self.collection_completed)

    def mark_warmup_collection(self) -> None:
        """Capture nothing more with this saver."""
        self.tensor_collected_in_warmup = True

    def should_collect_tensor(self) -> bool:
        """Whether the next tensor is captured."""
        return bool(self.enabled and not self.tensor_collected_in_warmup)

    def should_collect_in_steady_state(self) -> bool:
        """The same, by its other name."""
        return self.should_collect_tensor()

    @untraced
    def save_tensor(
        self,
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
        """Capture one tensor as it is now. Returns the record's reference, None where nothing was captured.

        quant_type: a label; None: CUSTOM_QUANT_TYPE, else the tensor's dtype. rank, sample_idx: see
        `capd_client.collection_state`. metadata: what is no JSON value becomes text; above 4096 bytes it is left out
        with a warning. Positional calls of versions without rank or sample_idx, whose metadata stands there, are
        understood. Dropped, and counted, when there is no room; with a daemon of the job's own it waits first.
        """
        if not self.should_collect_tensor():
            return None
        current = self._session()
        if current is None:
            return None
        try:
            rank, sample_idx, _, metadata = sorted_out(rank, sample_idx, None, metadata)
            names = (tensor_name, layer_type, component, operation, phase, layer_idx, "", "", quant_type)
            reference = capture_as_told(current, tensor, names, rank, sample_idx, metadata)
        except ConfigError as error:
            current.drop_invalid(str(error))
            return None
        except Exception as error:
            current.drop_internal("save_tensor()", error)
            return None
        self.tensor_counter += reference is not None
        return reference

    def save_attention_tensors(
        self,
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
        """`save_tensor` for those of query, key, value and attention_weights that are there, by their names."""
        rank, sample_idx, weights, metadata = sorted_out(rank, sample_idx, attention_weights, metadata)
        tensors = {"query": query, "key": key, "value": value, "attention_weights": weights}
        return {
            name: self.save_tensor(
                tensor, "attention", operation, quant_type, name, layer_idx, phase, component, rank, sample_idx,
                metadata,
            )
            for name, tensor in tensors.items()
            if tensor is not None
        }  # fmt: skip

    def save_linear_tensors(
        self,
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
        """`save_tensor` for those of input and weight that are there. In a backward, `input` is the gradient dY."""
        rank, sample_idx, _, metadata = sorted_out(rank, sample_idx, None, metadata)
        tensors = {"input": input_tensor, "weight": weight}
        return {
            name: self.save_tensor(
                tensor, "linear", operation, quant_type, name, layer_idx, phase, component, rank, sample_idx, metadata
            )
            for name, tensor in tensors.items()
            if tensor is not None
        }  # fmt: skip

    def _session(self) -> Optional[api.AnySession]:
        current = api.running()
        if current is None and not self._in_vain:
            try:
                current = api.session_into(str(self.save_dir))
            except Exception as error:  # only under CAPD_STRICT=1
                logger.warning("capd: capture is off: %s", error)
            self._in_vain = current is None
        return current


def get_tensor_saver() -> TensorSaver:
    """The saver of this process, made at the first call: enabled where capture is on, as the environment says then."""
    global _saver
    if _saver is None:
        try:
            enabled = api.session() is not None
        except Exception as error:  # only under CAPD_STRICT=1
            logger.warning("capd: capture is off: %s", error)
            enabled = False
        _saver = TensorSaver(os.environ.get("TENSOR_SAVE_DIR") or EMBEDDED_STORE, enabled)
    return _saver


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
    """`get_tensor_saver().save_tensor(…)`."""
    return get_tensor_saver().save_tensor(
        tensor,
        layer_type,
        operation,
        quant_type,
        tensor_name,
        layer_idx,
        phase,
        component,
        rank,
        sample_idx,
        metadata,
    )


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
    """`get_tensor_saver().save_attention_tensors(…)`."""
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
    """`get_tensor_saver().save_linear_tensors(…)`."""
    return get_tensor_saver().save_linear_tensors(
        input_tensor, weight, quant_type, operation, layer_idx, phase, component, rank, sample_idx, metadata
    )


def initialize_tensor_collection(
    rank: Optional[int] = None,
    sample_idx: Optional[int] = None,
    iteration: int = 0,
    batch_idx: int = 0,
    sequence_idx: int = 0,
) -> None:
    """Set the manual state. rank or sample_idx None leaves that to what was set before, or to the other sources."""
    if rank is not None:
        STATE.set_rank(rank)
    if sample_idx is not None:
        STATE.set_sample_idx(sample_idx)
    STATE.set_iteration(iteration)
    STATE.set_batch_idx(batch_idx)
    STATE.set_sequence_idx(sequence_idx)


def get_tensor_collection_state() -> TensorCollectionState:
    """The manual state of this process."""
    return STATE


def set_global_rank(rank: int) -> None:
    """Record further captures of these calls under this rank."""
    STATE.set_rank(rank)


def set_global_sample_idx(sample_idx: int) -> None:
    """Record further captures with this sample."""
    STATE.set_sample_idx(sample_idx)


def set_global_iteration(iteration: int) -> None:
    """Record further captures in this iteration."""
    STATE.set_iteration(iteration)


def set_global_batch_idx(batch_idx: int) -> None:
    """Record further captures with this batch."""
    STATE.set_batch_idx(batch_idx)


def set_global_sequence_idx(sequence_idx: int) -> None:
    """Record further captures with this sequence."""
    STATE.set_sequence_idx(sequence_idx)


def get_current_rank() -> Optional[int]:
    """The rank that the manual state, torch.distributed or the environment gives; None where none does."""
    return STATE.get_rank()


def get_current_rank_and_sample() -> tuple[Optional[int], Optional[int]]:
    """Rank and sample of a capture that names neither, the tensor's device left aside: 0 and 0 at the end."""
    return get_current_rank() or 0, sample_of()


def set_iteration(iteration: int) -> None:
    """`get_tensor_saver().set_iteration(iteration)`."""
    get_tensor_saver().set_iteration(iteration)


def mark_collection_completed() -> None:
    """`get_tensor_saver().mark_collection_completed()`."""
    get_tensor_saver().mark_collection_completed()


def should_collect_tensor() -> bool:
    """`get_tensor_saver().should_collect_tensor()`."""
    return get_tensor_saver().should_collect_tensor()
