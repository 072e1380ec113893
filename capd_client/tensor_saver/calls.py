"""Translates a call of `capd_client.tensor_saver` into a key, a moment and a capture."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Optional

import msgspec
import torch

from capd_client.errors import ConfigError
from capd_client.explicit.keys import key_of, moment_of
from capd_client.process.log import RateLimitedLog
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key
from capd_client.protocol.messages import MAX_METADATA_NBYTES
from capd_client.protocol.reference import reference_of
from capd_client.session import current as process
from capd_client.session.starting import AnySession
from capd_client.staging.describe import key_of_part
from capd_client.steps.checkpointing import repeating
from capd_client.steps.collection import within_quota
from capd_client.steps.trial_runs import trying
from capd_client.tensor_saver.state import STATE, rank_of, sample_of
from capd_client.tensors.inspect import PLAIN_TYPES
from capd_client.tensors.subclasses import inner_tensors

__all__ = ["capture_call", "sort_arguments"]

logger = logging.getLogger("capd_client")
_notices = RateLimitedLog()
# The session whose moment follows STATE.
_followed: Optional[AnySession] = None


def capture_call(
    current: AnySession, tensor: Any, names: tuple[Any, ...], rank: Any, sample_idx: Any, metadata: Any
) -> Optional[str]:
    """Capture a tensor with the names and numbers of the call and of STATE.

    Args:
        current: The session.
        tensor: Anything. If it is no tensor, it is counted as dropped.
        names: The first names of `capd_client.explicit.keys.key_of`. Without a label, CAPD_QUANT_TYPE or else
            CUSTOM_QUANT_TYPE is the label.
        rank, sample_idx, metadata: The arguments of the call.

    Returns:
        The record's reference. None if the tensor was dropped.

    Raises:
        ConfigError: An argument cannot be used.
    """
    if repeating() or trying():
        return None
    _follow(current)
    if not isinstance(tensor, torch.Tensor):
        current.drop_invalid(f"a {type(tensor).__name__} is not a torch tensor", DropReason.UNSUPPORTED)
        return None
    context, manual = current.context, STATE.manual
    number, source = rank_of(tensor, rank)
    sample = sample_of(sample_idx, context.sample_idx)
    key = key_of((*_labelled(names), tensor.dtype, number), current.quant_type)
    batch = manual.get("batch_idx", context.batch_idx or 0)
    sequence = manual.get("sequence_idx", context.sequence_idx or 0)
    moment = moment_of(context, key, (manual.get("iteration"), None, sample, batch, sequence))
    if not within_quota(current.config, context, moment):
        return None
    if logger.isEnabledFor(logging.DEBUG):
        _notices.debug(
            "%s: rank %d (%s), sample %d, iteration %d, layer %s %s, operation %s, phase %s",
            key.tensor_name, number, source, sample, moment.iteration, key.layer_type, key.layer, key.operation,
            key.phase,
        )  # fmt: skip
    # Under `capd plan` the session has no queue.
    queue = getattr(current, "queue", None)
    before = None if queue is None else queue.last_sequence
    current.offer(tensor, key, moment, metadata=_metadata_text(metadata))
    admitted = queue is not None and queue.last_sequence != before
    return reference_of(_recorded(key, tensor), moment) if admitted else None


def _recorded(key: Key, tensor: torch.Tensor) -> Key:
    """Return the key of the tensor's record. For a tensor that consists of others, it is the key of the first one."""
    parts = () if type(tensor) in PLAIN_TYPES else inner_tensors(tensor)
    return next((key_of_part(key, tensor, name, part) for name, part in parts), key)


def _labelled(names: tuple[Any, ...]) -> tuple[Any, ...]:
    if names[-1] is not None and names[-1] != "":
        return names
    label = os.environ.get("CAPD_QUANT_TYPE") or os.environ.get("CUSTOM_QUANT_TYPE") or None
    return (*names[:-1], label)


def sort_arguments(rank: Any, sample_idx: Any, weights: Any, metadata: Any) -> tuple[Any, Any, Any, Any]:
    """Return the last arguments of a call, sorted by type.

    Other versions have metadata in the place of rank or sample_idx.
    """
    given = (rank, sample_idx, weights)
    if not (_displaced(rank) or _displaced(sample_idx) or issubclass(type(weights), Mapping)):
        return *given, metadata
    metadata = next((value for value in given if issubclass(type(value), Mapping)), metadata)
    weights = next((value for value in given if issubclass(type(value), torch.Tensor)), None)
    rank, sample_idx = (None if _displaced(value) else value for value in given[:2])
    return rank, sample_idx, weights, metadata


def _displaced(value: Any) -> bool:
    """Whether an index argument holds metadata or the attention weights instead."""
    return value is not None and issubclass(type(value), (Mapping, torch.Tensor))


def _metadata_text(metadata: Any) -> str:
    if not metadata:
        return ""
    try:
        whole = metadata if isinstance(metadata, Mapping) else {"metadata": str(metadata)[:1000]}
        text = msgspec.json.encode({str(k): value for k, value in whole.items()}, enc_hook=_as_text).decode()
    except Exception as error:
        _notices.warn("metadata", "metadata is left out because it cannot be written as JSON: %s", error)
        return ""
    if len(text.encode()) > MAX_METADATA_NBYTES:
        _notices.warn("metadata", "metadata above %d bytes is left out", MAX_METADATA_NBYTES)
        return ""
    return text


def _as_text(value: Any) -> str:
    """Return the text of a value that JSON cannot hold.

    A tensor's elements are not read, because that waits for its device.
    """
    return f"tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else str(value)


def _follow(current: AnySession) -> None:
    """Have the session's moment follow STATE from now on, so that captures of `watch` have this moment, too."""
    global _followed
    if current is not _followed:
        _followed = current
        _set_moment(current, STATE.manual)


def _set_moment(current: AnySession, values: Mapping[str, Optional[int]]) -> None:
    try:
        current.context.set_moment(**values)
    except ConfigError as error:
        _notices.warn("state", "%s; the moment does not change", error)


def _changed(field: str) -> None:
    current = process.running()
    if current is not None:
        _set_moment(current, {field: STATE.manual.get(field)})


STATE.on_change = _changed
