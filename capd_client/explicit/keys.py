"""The key, the moment, the metadata and the attributes of an explicit capture, from the arguments of the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from capd_client.errors import ConfigError
from capd_client.process.text import brief
from capd_client.protocol.key import Key, Moment
from capd_client.steps.context import MOMENT_FIELDS, Context, as_index

__all__ = ["KEYS", "attributes_of", "key_of", "metadata_text", "moment_of"]

# -1 outside of a backward; see `capd_client.steps.checkpointing`.
_graph_task = torch._C._current_graph_task_id
_MAX_KEYS = 1 << 16

KEYS: dict[tuple[Any, ...], Key] = {}
"""The results of `key_of`, by its `names`."""


def key_of(names: tuple[Any, ...], label_of: Callable[[torch.dtype], str]) -> Key:
    """Return the key of these names, the same object every time.

    Args:
        names: tensor_name, layer_type, component, operation, phase, layer, module, stack, quant_type, the tensor's
            dtype and the rank.
        label_of: Returns the quant_type of a dtype. It is called if the quant_type in `names` is None.

    Raises:
        ConfigError: A name is unusable.
    """
    found = KEYS.get(names)
    if found is not None:
        return found
    tensor_name, layer_type, component, operation, phase, layer, module, stack, quant_type, dtype, rank = (
        names
    )
    for name in (tensor_name, layer_type, component, operation, phase, module, stack):
        if not isinstance(name, str):
            raise ConfigError(f"a name must be a str, not {brief(name)}")
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
    # A caller may invent new names all the time.
    if len(KEYS) >= _MAX_KEYS:
        KEYS.clear()
    KEYS[names] = key
    return key


def moment_of(context: Context, key: Key, overrides: tuple[Any, ...]) -> Moment:
    """Return the moment of a capture that overrides the context.

    Args:
        context: The current moment of the job.
        key: The key of the capture.
        overrides: A value for each of MOMENT_FIELDS; None: the value of the context.

    Raises:
        ConfigError: A value is no index.
    """
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
        context.calls.next(id(key), iteration, micro_batch),
        context.sample_idx if sample_idx is None else sample_idx,
        context.batch_idx if batch_idx is None else batch_idx,
        context.sequence_idx if sequence_idx is None else sequence_idx,
    )


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Return the metadata as JSON. Raises ConfigError if JSON cannot express it."""
    if not isinstance(metadata, Mapping):
        raise ConfigError(f"metadata must be a mapping of JSON values, not a {type(metadata).__name__}")
    try:
        return msgspec.json.encode(dict(metadata)).decode()
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ConfigError(f"metadata has a value that JSON cannot express: {error}") from None


def attributes_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the attributes, which the caller may change. Raises ConfigError if they are no mapping of names.

    Whether JSON can express the values is checked when the first tensor is offered with them.
    """
    if not isinstance(attributes, Mapping) or not all(isinstance(name, str) for name in attributes):
        raise ConfigError(f"attributes must be a mapping from names to JSON values, not {brief(attributes)}")
    return dict(attributes)
