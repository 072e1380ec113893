"""What a call says itself of one tensor, as names and numbers, becomes its key, its moment and its metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from capd_client.errors import ConfigError
from capd_client.protocol.key import Key, Moment
from capd_client.steps.context import MOMENT_FIELDS, Context, as_index

__all__ = ["KEYS", "key_of", "metadata_text", "moment_of"]

_graph_task = torch._C._current_graph_task_id  # -1 outside of a backward; see recompute
_MAX_KEYS = 1 << 16

KEYS: dict[tuple[Any, ...], Key] = {}
"""The keys that `key_of` made, by what it was given."""


def key_of(names: tuple[Any, ...], label_of: Callable[[torch.dtype], str]) -> Key:
    """The key of these names, the same object every time. Raises ConfigError for names that cannot be used.

    names: tensor_name, layer_type, component, operation, phase, layer, module, stack, the label, which is
    `label_of(dtype)` where it is None, the tensor's dtype and the rank.
    """
    found = KEYS.get(names)
    if found is not None:
        return found
    tensor_name, layer_type, component, operation, phase, layer, module, stack, quant_type, dtype, rank = (
        names
    )
    for name in (tensor_name, layer_type, component, operation, phase, module, stack):
        if not isinstance(name, str):
            raise ConfigError(f"a name is a str, not {name!r:.80}")
    key = Key(
        quant_type=label_of(dtype) if quant_type is None else quant_type,
        rank=rank,
        tensor_name=tensor_name,
        layer=None if layer is None else as_index("layer", layer),
        phase=phase,
        layer_type=layer_type,
        operation=operation,
        component=component,
        module=module,
        stack=stack,
    )
    if len(KEYS) >= _MAX_KEYS:  # a caller that makes up new names all the time
        KEYS.clear()
    KEYS[names] = key
    return key


def moment_of(context: Context, key: Key, overrides: tuple[Any, ...]) -> Moment:
    """The moment of a capture that gives some of MOMENT_FIELDS itself; None leaves one to the context."""
    iteration, micro_batch, sample_idx, batch_idx, sequence_idx = [
        value if value is None else as_index(name, value)
        for name, value in zip(MOMENT_FIELDS, overrides, strict=True)
    ]
    if iteration is not None:
        context.reach(iteration)
    elif _graph_task() == -1:
        context.begin_if_dirty()
    if iteration is None:
        iteration = context.iteration
    if micro_batch is None:
        micro_batch = context.micro_batch
    return context.moment_at(
        iteration,
        micro_batch,
        context.next_call(id(key), iteration, micro_batch),
        context.sample_idx if sample_idx is None else sample_idx,
        context.batch_idx if batch_idx is None else batch_idx,
        context.sequence_idx if sequence_idx is None else sequence_idx,
    )


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """The metadata as it is sent. Raises ConfigError for what JSON does not hold."""
    if not isinstance(metadata, Mapping):
        raise ConfigError(f"metadata is a mapping of JSON values, not a {type(metadata).__name__}")
    try:
        return msgspec.json.encode(dict(metadata)).decode()
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ConfigError(f"metadata holds something that JSON does not: {error}") from None
