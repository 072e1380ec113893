"""tensor_saver's TensorSaver, and the instance that its functions use in this process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import torch

from capd_client.config.settings import EMBEDDED_STORE
from capd_client.emulation.from_settings import job_quantises
from capd_client.emulation.job_quantisers import TENSOR_SAVER
from capd_client.errors import ConfigError
from capd_client.process.dynamo import untraced, untraced_methods
from capd_client.session import current as process
from capd_client.session.starting import AnySession
from capd_client.tensor_saver.calls import capture_call, sort_arguments
from capd_client.tensor_saver.indices import index_of_variable, say_once, usable
from capd_client.tensor_saver.state import STATE

__all__ = ["TensorSaver", "get_tensor_saver"]

logger = logging.getLogger("capd_client")
_saver: Optional[TensorSaver] = None


@untraced_methods
class TensorSaver:
    """A saver with the calls of tensor_saver's TensorSaver. It captures while `enabled`."""

    def __init__(self, save_dir: str = EMBEDDED_STORE, enabled: bool = True) -> None:
        """Create a saver.

        Args:
            save_dir: The directory of the runs, if nothing else says where captures go. Then this process starts its
                own daemon there. Otherwise the daemon has its own store.
            enabled: False captures nothing.
        """
        self.save_dir = Path(str(save_dir or EMBEDDED_STORE))
        self.enabled = enabled
        # The number of tensors that this saver has captured.
        self.tensor_counter = 0
        self.micro_batch_count = 0
        self.control_micro_batches = 1
        self.collection_completed = False
        self.tensor_collected_in_warmup = False
        # A directory for which no session could be opened.
        self._in_vain: Optional[Path] = None
        job_quantises(TENSOR_SAVER)

    @property
    def current_iteration(self) -> int:
        """The iteration of the manual state (`get_tensor_collection_state()`)."""
        return STATE.get_iteration()

    @current_iteration.setter
    def current_iteration(self, iteration: int) -> None:
        STATE.current_iteration = iteration

    def set_iteration(self, iteration: int) -> None:
        """Record further captures in this iteration."""
        self.micro_batch_count = 0
        STATE.set_iteration(iteration)

    def set_enabled(self, enabled: bool) -> None:
        """Switch captures of this saver on or off."""
        self.enabled = enabled

    def set_save_dir(self, save_dir: str) -> None:
        """Set the directory of the runs for a daemon of this job.

        If captures already have a place, warn once and do nothing.
        """
        self.save_dir = Path(str(save_dir or EMBEDDED_STORE))
        if process.running() is not None:
            problem = f"captures continue to the place where they already go, not to {self.save_dir}"
            say_once("save_dir", str(self.save_dir)[:160], problem)

    def increment_micro_batch(self) -> None:
        """Count a micro-batch for `should_continue_collection`."""
        self.micro_batch_count += 1

    def should_continue_collection(self) -> bool:
        """Whether fewer micro-batches were counted than COLLECT_MICRO_BATCHES. Captures do not depend on it."""
        return not self.enabled or self.micro_batch_count < self.control_micro_batches

    def mark_collection_completed(self) -> None:
        """Make `should_exit_after_forward` return True. Captures do not depend on it."""
        self.collection_completed = True

    def should_exit_after_forward(self) -> bool:
        """Whether this saver captures and `mark_collection_completed` was called."""
        return bool(self.enabled and self.collection_completed)

    def mark_warmup_collection(self) -> None:
        """Stop captures of this saver."""
        self.tensor_collected_in_warmup = True

    def should_collect_tensor(self) -> bool:
        """Whether the next tensor is captured."""
        return bool(self.enabled and not self.tensor_collected_in_warmup)

    should_collect_in_steady_state = should_collect_tensor

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
        """Capture the current content of one tensor.

        If there is no room, the capture is dropped and counted. With the job's own daemon it waits for room first.
        Positional calls of versions without rank or sample_idx, which pass metadata there, are understood.

        Args:
            tensor, layer_type, operation, tensor_name, layer_idx, phase, component: The tensor and its names.
            quant_type: A label. If None, it is CAPD_QUANT_TYPE, CUSTOM_QUANT_TYPE, or else the tensor's dtype.
            rank, sample_idx: See `capd_client.tensor_saver.state`.
            metadata: Values that JSON cannot hold become text. Above 4096 bytes it is left out with a warning.

        Returns:
            The record's reference. None if nothing was captured.
        """
        if not self.should_collect_tensor():
            return None
        current = self._session()
        if current is None:
            return None
        try:
            rank, sample_idx, _, metadata = sort_arguments(rank, sample_idx, None, metadata)
            names = (tensor_name, layer_type, component, operation, phase, layer_idx, "", "", quant_type)
            reference = capture_call(current, tensor, names, rank, sample_idx, metadata)
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
        """Call `save_tensor` for query, key, value and attention_weights, except those that are None.

        Return references by name.
        """
        rank, sample_idx, weights, metadata = sort_arguments(rank, sample_idx, attention_weights, metadata)
        tensors = {"query": query, "key": key, "value": value, "attention_weights": weights}
        others = (layer_idx, phase, component, rank, sample_idx, metadata)
        return self._save_each(tensors, "attention", operation, quant_type, *others)

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
        """Call `save_tensor` for input and weight, except those that are None.

        In a backward, `input` is the gradient dY.
        """
        rank, sample_idx, _, metadata = sort_arguments(rank, sample_idx, None, metadata)
        others = (layer_idx, phase, component, rank, sample_idx, metadata)
        tensors = {"input": input_tensor, "weight": weight}
        return self._save_each(tensors, "linear", operation, quant_type, *others)

    def _save_each(
        self, tensors: dict[str, Any], layer_type: str, operation: str, quant_type: str, *others: Any
    ) -> dict[str, Optional[str]]:
        return {
            name: self.save_tensor(tensor, layer_type, operation, quant_type, name, *others)
            for name, tensor in tensors.items()
            if tensor is not None
        }

    def _session(self) -> Optional[AnySession]:
        current = process.running()
        if current is None and self._in_vain != self.save_dir:
            current = _opened(lambda: process.session_into(str(self.save_dir)))
            self._in_vain = self.save_dir if current is None else None
        return current


@untraced
def get_tensor_saver() -> TensorSaver:
    """Return the saver of this process. The first call creates it, enabled if capture is on at that time.

    If neither CAPD_ENDPOINT nor TENSOR_SAVE_ENABLED is set, Megatron's argument `--save-tensors` decides.
    """
    global _saver
    if _saver is None:
        arguments = _megatron_arguments()
        saver = TensorSaver(os.environ.get("TENSOR_SAVE_DIR") or EMBEDDED_STORE)
        if getattr(arguments, "save_tensors", False):
            saver.save_dir = Path(str(getattr(arguments, "tensor_save_dir", None) or saver.save_dir))
            saver.enabled = saver._session() is not None
        else:
            saver.enabled = _opened(process.session) is not None
        limit = usable("collect_micro_batches", getattr(arguments, "collect_micro_batches", None))
        saver.control_micro_batches = index_of_variable("COLLECT_MICRO_BATCHES") or limit or 1
        _saver = saver
    return _saver


def _opened(session: Callable[[], Optional[AnySession]]) -> Optional[AnySession]:
    try:
        return session()
    except Exception as error:
        # This happens only under CAPD_STRICT=1.
        logger.warning("capd: capture is off: %s", error)
        return None


def _megatron_arguments() -> Any:
    """Return the parsed command line of Megatron, if this process has one by now. Imports nothing."""
    try:
        return sys.modules["megatron.training.global_vars"].get_args()
    except Exception:
        # There is no Megatron, or nothing is parsed yet.
        return None
